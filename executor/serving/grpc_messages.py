"""Between `inflight.v1` messages and the serving layer's own types. No logic beyond that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from batch_manager.kv import InvalidKvCacheConfigError
from batch_manager.kv.retention import DEFAULT_PRIORITY
from batch_manager.request import FinishReason
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.request import (
    ContextPhaseParams,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    RequestType,
)
from executor.api.sampling_config import SamplingConfig
from executor.serving.events import Accepted, Delta, Event, Finished, TokenLogProb
from executor.serving.generation_request import (
    MAX_RETENTION_RANGES,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from protos.inflight.v1 import inference_pb2 as pb

_T = TypeVar("_T")

SCHEMA_REVISION = 4
"""Revision of `inflight.v1` that this server speaks. Raised with every change of the .proto files."""

_ROLE_NAMES: dict[int, str] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_GUIDE_TYPES: dict[int, GuideType] = {
    pb.GUIDE_TYPE_JSON: GuideType.JSON,
    pb.GUIDE_TYPE_JSON_SCHEMA: GuideType.JSON_SCHEMA,
    pb.GUIDE_TYPE_REGEX: GuideType.REGEX,
    pb.GUIDE_TYPE_EBNF_GRAMMAR: GuideType.EBNF_GRAMMAR,
    pb.GUIDE_TYPE_STRUCTURAL_TAG: GuideType.STRUCTURAL_TAG,
}

_REQUEST_TYPES: dict[int, RequestType] = {
    pb.REQUEST_TYPE_UNSPECIFIED: RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
    pb.REQUEST_TYPE_CONTEXT_ONLY: RequestType.REQUEST_TYPE_CONTEXT_ONLY,
    pb.REQUEST_TYPE_GENERATION_ONLY: RequestType.REQUEST_TYPE_GENERATION_ONLY,
}

FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    FinishReason.END_ID: pb.FINISH_REASON_END_ID,
    FinishReason.STOP_WORDS: pb.FINISH_REASON_STOP_WORDS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIMED_OUT: pb.FINISH_REASON_TIMED_OUT,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def generation_request(message: pb.GenerateRequest) -> GenerationRequest:
    """Read a request.

    Raises:
        InvalidRequestError: no prompt, or an enum value that is not set or not known; names the field.
        UnsupportedFeatureError: a newer schema revision, or a field that this revision does not have.
    """
    check_revision(message)
    output = message.output_config
    return GenerationRequest(
        _prompt(message),
        max_tokens=_optional(message, "max_tokens"),
        streaming=message.streaming,
        sampling_config=_sampling_config(message.sampling_config),
        return_log_probs=output.return_log_probs,
        num_top_log_probs=output.num_top_log_probs,
        return_prompt_log_probs=output.return_prompt_log_probs,
        stop_strings=list(message.stop_strings),
        stop_token_ids=list(message.stop_token_ids),
        include_stop=message.include_stop,
        ignore_eos=message.ignore_eos,
        bad_words=[list(word.token_ids) for word in message.bad_words],
        num_return_sequences=_optional(message, "num_return_sequences", 1),
        priority=_optional(message, "priority", 0.5),
        tenant=message.tenant,
        cache_salt_id=_optional(message, "cache_salt_id"),
        allotted_time_ms=_optional(message, "allotted_time_ms"),
        guided_decoding_params=_guided_decoding(message),
        lookahead_config=_lookahead(message),
        kv_cache_retention_config=_retention(message),
        request_id=_optional(message, "request_id"),
        request_type=_enum(_REQUEST_TYPES, message.request_type, "request_type"),
        context_phase_params=_context_phase_params(message),
    )


def check_revision(message: pb.GenerateRequest) -> None:
    """Refuse what a newer client means and this server cannot see."""
    if message.schema_revision > SCHEMA_REVISION:
        raise UnsupportedFeatureError(
            f"schema_revision is {message.schema_revision}; this server speaks revisions up to {SCHEMA_REVISION}",
            field="schema_revision",
        )
    for path in _unknown_fields(message, ""):
        raise UnsupportedFeatureError(f"{path} is not known to schema revision {SCHEMA_REVISION}", field=path)


def _unknown_fields(message: Message, prefix: str) -> Iterator[str]:
    """Paths of fields that the schema does not have, by number."""
    for unknown in UnknownFieldSet(message):
        yield f"{prefix}field {unknown.field_number}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for nested in value if descriptor.is_repeated else (value,):
                yield from _unknown_fields(nested, f"{prefix}{descriptor.name}.")


def _optional(message: Message, name: str, default: object = None) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return ChatPrompt(
                [
                    ChatMessage(_enum(_ROLE_NAMES, turn.role, f"chat.messages[{index}].role"), turn.content)
                    for index, turn in enumerate(message.chat.messages)
                ]
            )
        case "input_token_ids":
            return TokenPrompt(list(message.input_token_ids.token_ids))
        case _:
            raise InvalidRequestError("prompt is not set; set one of text, chat, input_token_ids", field="prompt")


def _sampling_config(message: pb.SamplingConfig) -> SamplingConfig:
    return SamplingConfig(**{descriptor.name: value for descriptor, value in message.ListFields()})


def _guided_decoding(message: pb.GenerateRequest) -> GuidedDecodingParams | None:
    if not message.HasField("guided_decoding_params"):
        return None
    params = message.guided_decoding_params
    kind = _enum(_GUIDE_TYPES, params.guide_type, "guided_decoding_params.guide_type")
    return GuidedDecodingParams(kind, _optional(params, "guide"))


def _lookahead(message: pb.GenerateRequest) -> LookaheadDecodingConfig | None:
    if not message.HasField("lookahead_config"):
        return None
    config = message.lookahead_config
    return LookaheadDecodingConfig(config.max_window_size, config.max_ngram_size, config.max_verification_set_size)


def _retention(message: pb.GenerateRequest) -> KvCacheRetentionConfig | None:
    field = "kv_cache_retention_config"
    if not message.HasField(field):
        return None
    config = message.kv_cache_retention_config
    ranges = config.token_range_retention_configs
    if len(ranges) > MAX_RETENTION_RANGES:
        raise InvalidRequestError(
            f"{field} has {len(ranges)} ranges; at most {MAX_RETENTION_RANGES} are taken", field=field
        )
    try:
        return KvCacheRetentionConfig(
            [
                KvCacheRetentionConfig.TokenRangeRetentionConfig(
                    part.token_start,
                    _optional(part, "token_end"),
                    _optional(part, "priority", DEFAULT_PRIORITY),
                    _optional(part, "duration_ms"),
                )
                for part in ranges
            ],
            _optional(config, "decode_retention_priority", DEFAULT_PRIORITY),
            _optional(config, "decode_duration_ms"),
        )
    except InvalidKvCacheConfigError as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from None


def _context_phase_params(message: pb.GenerateRequest) -> ContextPhaseParams | None:
    if not message.HasField("context_phase_params"):
        return None
    params = message.context_phase_params
    return ContextPhaseParams(
        list(params.first_gen_tokens), params.req_id, params.opaque_state or None, list(params.draft_tokens) or None
    )


def _enum(names: dict[int, _T], value: int, field: str) -> _T:
    if value not in names:
        known = ", ".join(str(number) for number in names)
        raise InvalidRequestError(f"{field} is {value}; it must be one of {known}", field=field)
    return names[value]


def response_message(event: Event) -> pb.GenerateResponse:
    """Write an event. Deltas are written field by field: for each streamed token, that takes half as long."""
    if isinstance(event, Delta):
        response = pb.GenerateResponse()
        delta = response.delta
        delta.output_index = event.output_index
        delta.text = event.text
        delta.token_ids.extend(event.token_ids)
        if event.log_probs:
            delta.log_probs.extend(_log_prob(entry) for entry in event.log_probs)
        return response
    if isinstance(event, Accepted):
        return pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=event.request_id,
                schema_revision=SCHEMA_REVISION,
                prompt_tokens=event.prompt_tokens,
                executor_request_ids=event.executor_request_ids,
            )
        )
    return pb.GenerateResponse(finished=_finished(event))


def _log_prob(entry: TokenLogProb) -> pb.TokenLogProb:
    top = [pb.TopLogProb(token_id=token_id, log_prob=log_prob) for token_id, log_prob in entry.top]
    return pb.TokenLogProb(log_prob=entry.log_prob, top=top)


def _finished(event: Finished) -> pb.Finished:
    usage = event.usage
    message = pb.Finished(
        output_index=event.output_index,
        finish_reason=FINISH_REASONS[event.finish_reason],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            reused_tokens=usage.reused_tokens,
        ),
        prompt_log_probs=event.prompt_log_probs,
    )
    params = event.context_phase_params
    if params is not None:
        message.context_phase_params.first_gen_tokens.extend(params.first_gen_tokens)
        message.context_phase_params.req_id = params.req_id
        message.context_phase_params.opaque_state = params.opaque_state or b""
        message.context_phase_params.draft_tokens.extend(params.draft_tokens or ())
    match = event.stop_match
    if match is not None:
        if match.stop_string is not None:
            message.stop_string = match.stop_string
        elif match.stop_token_id is not None:
            message.stop_token_id = match.stop_token_id
        elif match.end_id is not None:
            message.end_id = match.end_id
    return message
