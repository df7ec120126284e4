from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_TYPE_UNSPECIFIED: _ClassVar[RequestType]
    REQUEST_TYPE_CONTEXT_ONLY: _ClassVar[RequestType]
    REQUEST_TYPE_GENERATION_ONLY: _ClassVar[RequestType]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class GuideType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDE_TYPE_UNSPECIFIED: _ClassVar[GuideType]
    GUIDE_TYPE_JSON: _ClassVar[GuideType]
    GUIDE_TYPE_JSON_SCHEMA: _ClassVar[GuideType]
    GUIDE_TYPE_REGEX: _ClassVar[GuideType]
    GUIDE_TYPE_EBNF_GRAMMAR: _ClassVar[GuideType]
    GUIDE_TYPE_STRUCTURAL_TAG: _ClassVar[GuideType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END_ID: _ClassVar[FinishReason]
    FINISH_REASON_STOP_WORDS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TIMED_OUT: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class AbortOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_OUTCOME_UNSPECIFIED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_ABORTED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_NOT_LIVE: _ClassVar[AbortOutcome]
REQUEST_TYPE_UNSPECIFIED: RequestType
REQUEST_TYPE_CONTEXT_ONLY: RequestType
REQUEST_TYPE_GENERATION_ONLY: RequestType
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
GUIDE_TYPE_UNSPECIFIED: GuideType
GUIDE_TYPE_JSON: GuideType
GUIDE_TYPE_JSON_SCHEMA: GuideType
GUIDE_TYPE_REGEX: GuideType
GUIDE_TYPE_EBNF_GRAMMAR: GuideType
GUIDE_TYPE_STRUCTURAL_TAG: GuideType
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END_ID: FinishReason
FINISH_REASON_STOP_WORDS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TIMED_OUT: FinishReason
FINISH_REASON_CANCELLED: FinishReason
ABORT_OUTCOME_UNSPECIFIED: AbortOutcome
ABORT_OUTCOME_ABORTED: AbortOutcome
ABORT_OUTCOME_NOT_LIVE: AbortOutcome

class GenerateRequest(_message.Message):
    __slots__ = ("schema_revision", "request_id", "text", "chat", "input_token_ids", "max_tokens", "streaming", "sampling_config", "output_config", "stop_strings", "stop_token_ids", "include_stop", "ignore_eos", "bad_words", "num_return_sequences", "priority", "tenant", "cache_salt_id", "allotted_time_ms", "guided_decoding_params", "lookahead_config", "kv_cache_retention_config", "request_type", "context_phase_params")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_CONFIG_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CONFIG_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOTTED_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_DECODING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_CONFIG_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_RETENTION_CONFIG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PHASE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    request_id: str
    text: str
    chat: ChatPrompt
    input_token_ids: TokenSequence
    max_tokens: int
    streaming: bool
    sampling_config: SamplingConfig
    output_config: OutputConfig
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    num_return_sequences: int
    priority: float
    tenant: str
    cache_salt_id: int
    allotted_time_ms: int
    guided_decoding_params: GuidedDecodingParams
    lookahead_config: LookaheadDecodingConfig
    kv_cache_retention_config: KvCacheRetentionConfig
    request_type: RequestType
    context_phase_params: ContextPhaseParams
    def __init__(self, schema_revision: _Optional[int] = ..., request_id: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., input_token_ids: _Optional[_Union[TokenSequence, _Mapping]] = ..., max_tokens: _Optional[int] = ..., streaming: bool = ..., sampling_config: _Optional[_Union[SamplingConfig, _Mapping]] = ..., output_config: _Optional[_Union[OutputConfig, _Mapping]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: bool = ..., ignore_eos: bool = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., num_return_sequences: _Optional[int] = ..., priority: _Optional[float] = ..., tenant: _Optional[str] = ..., cache_salt_id: _Optional[int] = ..., allotted_time_ms: _Optional[int] = ..., guided_decoding_params: _Optional[_Union[GuidedDecodingParams, _Mapping]] = ..., lookahead_config: _Optional[_Union[LookaheadDecodingConfig, _Mapping]] = ..., kv_cache_retention_config: _Optional[_Union[KvCacheRetentionConfig, _Mapping]] = ..., request_type: _Optional[_Union[RequestType, str]] = ..., context_phase_params: _Optional[_Union[ContextPhaseParams, _Mapping]] = ...) -> None: ...

class ContextPhaseParams(_message.Message):
    __slots__ = ("first_gen_tokens", "req_id", "opaque_state", "draft_tokens")
    FIRST_GEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQ_ID_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_gen_tokens: _containers.RepeatedScalarFieldContainer[int]
    req_id: int
    opaque_state: bytes
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_gen_tokens: _Optional[_Iterable[int]] = ..., req_id: _Optional[int] = ..., opaque_state: _Optional[bytes] = ..., draft_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: Role
    content: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingConfig(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_ignore_length", "no_repeat_ngram_size", "top_p_decay", "top_p_min", "top_p_reset_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IGNORE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_DECAY_FIELD_NUMBER: _ClassVar[int]
    TOP_P_MIN_FIELD_NUMBER: _ClassVar[int]
    TOP_P_RESET_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_ignore_length: int
    no_repeat_ngram_size: int
    top_p_decay: float
    top_p_min: float
    top_p_reset_ids: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., prompt_ignore_length: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ..., top_p_decay: _Optional[float] = ..., top_p_min: _Optional[float] = ..., top_p_reset_ids: _Optional[int] = ...) -> None: ...

class OutputConfig(_message.Message):
    __slots__ = ("return_log_probs", "num_top_log_probs", "return_prompt_log_probs")
    RETURN_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    return_log_probs: bool
    num_top_log_probs: int
    return_prompt_log_probs: bool
    def __init__(self, return_log_probs: bool = ..., num_top_log_probs: _Optional[int] = ..., return_prompt_log_probs: bool = ...) -> None: ...

class GuidedDecodingParams(_message.Message):
    __slots__ = ("guide_type", "guide")
    GUIDE_TYPE_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    guide_type: GuideType
    guide: str
    def __init__(self, guide_type: _Optional[_Union[GuideType, str]] = ..., guide: _Optional[str] = ...) -> None: ...

class LookaheadDecodingConfig(_message.Message):
    __slots__ = ("max_window_size", "max_ngram_size", "max_verification_set_size")
    MAX_WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_VERIFICATION_SET_SIZE_FIELD_NUMBER: _ClassVar[int]
    max_window_size: int
    max_ngram_size: int
    max_verification_set_size: int
    def __init__(self, max_window_size: _Optional[int] = ..., max_ngram_size: _Optional[int] = ..., max_verification_set_size: _Optional[int] = ...) -> None: ...

class KvCacheRetentionConfig(_message.Message):
    __slots__ = ("token_range_retention_configs", "decode_retention_priority", "decode_duration_ms")
    TOKEN_RANGE_RETENTION_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DECODE_DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    token_range_retention_configs: _containers.RepeatedCompositeFieldContainer[TokenRangeRetentionConfig]
    decode_retention_priority: int
    decode_duration_ms: int
    def __init__(self, token_range_retention_configs: _Optional[_Iterable[_Union[TokenRangeRetentionConfig, _Mapping]]] = ..., decode_retention_priority: _Optional[int] = ..., decode_duration_ms: _Optional[int] = ...) -> None: ...

class TokenRangeRetentionConfig(_message.Message):
    __slots__ = ("token_start", "token_end", "priority", "duration_ms")
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    token_start: int
    token_end: int
    priority: int
    duration_ms: int
    def __init__(self, token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., priority: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    delta: Delta
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "schema_revision", "prompt_tokens", "executor_request_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    schema_revision: int
    prompt_tokens: int
    executor_request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., schema_revision: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., executor_request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("output_index", "text", "token_ids", "log_probs")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedCompositeFieldContainer[TokenLogProb]
    def __init__(self, output_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[_Union[TokenLogProb, _Mapping]]] = ...) -> None: ...

class TokenLogProb(_message.Message):
    __slots__ = ("log_prob", "top")
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    log_prob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogProb]
    def __init__(self, log_prob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogProb, _Mapping]]] = ...) -> None: ...

class TopLogProb(_message.Message):
    __slots__ = ("token_id", "log_prob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    log_prob: float
    def __init__(self, token_id: _Optional[int] = ..., log_prob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("output_index", "finish_reason", "stop_string", "stop_token_id", "end_id", "usage", "prompt_log_probs", "context_phase_params")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    END_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PHASE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    end_id: int
    usage: Usage
    prompt_log_probs: _containers.RepeatedScalarFieldContainer[float]
    context_phase_params: ContextPhaseParams
    def __init__(self, output_index: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., end_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_log_probs: _Optional[_Iterable[float]] = ..., context_phase_params: _Optional[_Union[ContextPhaseParams, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "reused_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: AbortOutcome
    def __init__(self, outcome: _Optional[_Union[AbortOutcome, str]] = ...) -> None: ...
