"""What a client asks for. Names, order and defaults follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, ClassVar

from executor.api.decoding import EagleConfig, ExternalDraftTokensConfig, LookaheadDecodingConfig
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingParams, GuideType
from executor.api.kv_cache_config import KvCacheRetentionConfig
from executor.api.model_inputs import LoraConfig, MropeConfig, MultimodalInput, PromptTuningConfig
from executor.api.renamed import renamed
from executor.api.sampling_config import SamplingConfig
from executor.api.support import accepted, addition, check_supported, refused, supported

__all__ = [
    "AdditionalModelOutput",
    "ContextPhaseParams",
    "EagleConfig",
    "ExternalDraftTokensConfig",
    "GuideType",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LogitsPostProcessor",
    "LookaheadDecodingConfig",
    "OutputConfig",
    "Request",
    "RequestType",
]

_NOT_YET = "this version does not offer it"
_DECODER_ONLY = "only decoder-only text models are offered"


class RequestType(IntEnum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


@dataclass(slots=True)
class AdditionalModelOutput:
    name: str
    gather_context: bool = False


@dataclass(slots=True)
class OutputConfig:
    """What a response carries beside tokens."""

    return_log_probs: bool = False
    return_context_logits: bool = False
    """The prompt is then computed from its first token on: nothing of it is taken from the cache."""
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    """Without it a non-streaming result starts with the prompt, as upstream's does. Streaming results never do."""
    return_encoder_output: bool = refused(False, _DECODER_ONLY)
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = refused(None, "plans have no output but logits")
    _: KW_ONLY
    num_top_log_probs: int = addition(0)
    """With `return_log_probs`: the most likely tokens beside each generated one."""
    return_prompt_log_probs: bool = addition(False)
    """Log probabilities of the prompt's tokens, each given those before it. As with `return_context_logits`, nothing
    of the prompt is taken from the cache."""


@dataclass(slots=True)
class ContextPhaseParams:
    """What a context-only request hands to the generation-only one that continues it: handed on as it is."""

    first_gen_tokens: list[int]
    req_id: int
    """The context-only request's id at its own instance."""
    opaque_state: bytes | None = None
    """Where the context lies: versioned, checked, at most 64 KiB."""
    draft_tokens: list[int] | None = None
    """What may follow `first_gen_tokens`."""


LogitsPostProcessor = Callable[..., None]
"""`(request_id, logits [1, beam, vocab], token ids [[...]], stream, client_id)`: changes the logits in place."""


@renamed(max_new_tokens="max_tokens")
@dataclass(slots=True)
class Request:
    """A prompt and what to do with it. Checked by `validate`; the engine's own limits are checked by the Executor."""

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    input_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    """Token that ends the output; `None` and -1: none does (the serving layer fills in the model's)."""
    pad_id: int | None = accepted(None, "rows are packed, so nothing is ever padded")
    position_ids: list[int] | None = supported(None, "0, 1, 2, ... only: cached blocks are found by their tokens")
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: Any = None
    """Added to the logits: array-like, float32 `[vocab_size]`."""
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = refused(None, _NOT_YET)
    multimodal_input: MultimodalInput | None = refused(None, _DECODER_ONLY)
    multimodal_embedding: Any = refused(None, _DECODER_ONLY)
    mrope_config: MropeConfig | None = refused(None, _DECODER_ONLY)
    lora_config: LoraConfig | None = refused(None, "LoRA adapters are not offered yet")
    lookahead_config: LookaheadDecodingConfig | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    logits_post_processor: LogitsPostProcessor | None = None
    encoder_input_token_ids: list[int] | None = refused(None, _DECODER_ONLY)
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    """Streaming results carry all tokens so far instead of the new ones."""
    priority: float = 0.5
    type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    context_phase_params: ContextPhaseParams | None = None
    """Of the context-only request with the same prompt, for a generation-only one."""
    encoder_input_features: Any = refused(None, _DECODER_ONLY)
    encoder_output_length: int | None = refused(None, _DECODER_ONLY)
    cross_attention_mask: Any = refused(None, _DECODER_ONLY)
    num_return_sequences: int = 1
    eagle_config: EagleConfig | None = refused(None, "draft models are not offered yet")
    skip_cross_attn_blocks: Any = refused(None, _DECODER_ONLY)
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: int | None = refused(None, _NOT_YET)
    allotted_time_ms: timedelta | int | None = None
    cache_salt_id: int | None = None
    disagg_request_id: int | None = refused(None, "contexts are found by context_phase_params")
    tenant: str = addition("")
    """Who is charged by the fair queue."""

    def validate(self) -> None:
        """Raise a `RequestError` naming the first field that is wrong whatever the engine is."""
        if len(self.input_token_ids) == 0:
            raise InvalidRequestError(
                "input_token_ids is empty; a prompt has at least one token", field="input_token_ids"
            )
        _check_count("max_tokens", self.max_tokens)
        if not 0.0 <= self.priority <= 1.0:
            raise InvalidRequestError(f"priority is {self.priority}; it must be in [0, 1]", field="priority")
        _check_count("num_return_sequences", self.num_return_sequences)
        for name, words in (("bad_words", self.bad_words), ("stop_words", self.stop_words)):
            if words is not None and any(len(word) == 0 for word in words):
                raise InvalidRequestError(f"{name} holds an empty sequence", field=name)
        if self.allotted_time_seconds is not None and self.allotted_time_seconds < 0:
            raise InvalidRequestError("allotted_time_ms is negative", field="allotted_time_ms")
        self.sampling_config.validate()
        check_supported(self, "request")
        self._check_position_ids()
        self._check_type()

    def _check_position_ids(self) -> None:
        if self.position_ids is None:
            return
        num_tokens = len(self.input_token_ids)
        if len(self.position_ids) != num_tokens:
            raise InvalidRequestError(
                f"position_ids has {len(self.position_ids)} entries; the prompt has {num_tokens} tokens",
                field="position_ids",
            )
        for index, position in enumerate(self.position_ids):
            if position != index:
                raise UnsupportedFeatureError(
                    f"position_ids[{index}] is {position}; only {index} is supported: cached blocks are found by their "
                    "tokens",
                    field="position_ids",
                )

    def _check_type(self) -> None:
        is_generation_only = self.type is RequestType.REQUEST_TYPE_GENERATION_ONLY
        if is_generation_only != (self.context_phase_params is not None):
            raise InvalidRequestError(
                f"type is {self.type.name} {'without' if is_generation_only else 'with'} context_phase_params; "
                "generation-only requests have them, others do not",
                field="context_phase_params",
            )
        if self.type is RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION:
            return
        if self.num_sequences != 1:
            raise InvalidRequestError(
                f"num_return_sequences is {self.num_sequences}; a {self.type.name} request has one sequence",
                field="num_return_sequences",
            )
        if self.output_config.return_generation_logits:
            raise UnsupportedFeatureError(
                f"output_config.return_generation_logits is not supported for {self.type.name}: logits stay where they "
                "were computed",
                field="output_config.return_generation_logits",
            )
        if is_generation_only and self.wants_context:
            raise UnsupportedFeatureError(
                "return_context_logits and return_prompt_log_probs are not supported for a generation-only request: "
                "ask the context-only one",
                field="output_config.return_context_logits",
            )

    @property
    def request_type(self) -> RequestType:
        """Upstream's name for the attribute that its constructor calls `type`."""
        return self.type

    @request_type.setter
    def request_type(self, value: RequestType) -> None:
        self.type = value

    @property
    def effective_end_id(self) -> int | None:
        """The token that ends the output, or `None`; -1 is upstream's way to say none."""
        return None if self.end_id in (None, -1) else self.end_id

    @property
    def num_sequences(self) -> int:
        """Outputs to make, asked for in either of upstream's two places."""
        return max(self.num_return_sequences, self.sampling_config.num_return_sequences or 1)

    @property
    def wants_context(self) -> bool:
        """Whether something is wanted at each position of the prompt."""
        return self.output_config.return_context_logits or self.output_config.return_prompt_log_probs

    @property
    def allotted_time_seconds(self) -> float | None:
        if self.allotted_time_ms is None:
            return None
        if isinstance(self.allotted_time_ms, timedelta):
            return self.allotted_time_ms.total_seconds()
        return self.allotted_time_ms / 1000


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer, at least 1", field=name)
