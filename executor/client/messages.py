"""Between the client's types and `inflight.v1` messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TypedDict, Unpack

from batch_manager.iteration_table import IterationRow
from batch_manager.plan import Phase
from batch_manager.request import FinishReason
from executor.api.errors import InvalidRequestError
from executor.api.request import (
    ContextPhaseParams,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    RequestType,
)
from executor.api.response import Usage
from executor.api.sampling_config import SamplingConfig
from executor.serving.events import Accepted, Delta, Event, Finished, StopMatch, TokenLogProb
from executor.serving.generation_request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from protos.inflight.v1 import control_pb2, inference_pb2

PromptLike = Prompt | str | Sequence[ChatMessage] | Sequence[int]
"""Text, chat messages or token ids, plain or wrapped."""


class GenerationFields(TypedDict, total=False):
    """The fields of `GenerationRequest` beside the prompt."""

    max_tokens: int | None
    streaming: bool
    sampling_config: SamplingConfig
    return_log_probs: bool
    num_top_log_probs: int
    return_prompt_log_probs: bool
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    bad_words: Sequence[Sequence[int]]
    num_return_sequences: int
    priority: float
    tenant: str
    cache_salt_id: int | None
    allotted_time_ms: int | None
    guided_decoding_params: GuidedDecodingParams | None
    lookahead_config: LookaheadDecodingConfig | None
    kv_cache_retention_config: KvCacheRetentionConfig | None
    request_type: RequestType
    context_phase_params: ContextPhaseParams | None
    request_id: str | None


def generation_request(prompt: PromptLike, **options: Unpack[GenerationFields]) -> GenerationRequest:
    """Put a request together from a prompt in any form."""
    return GenerationRequest(_as_prompt(prompt), **options)


def _as_prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, TextPrompt | ChatPrompt | TokenPrompt):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    messages = [item for item in prompt if isinstance(item, ChatMessage)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(messages) == len(prompt) != 0:
        return ChatPrompt(messages)
    if len(token_ids) == len(prompt):
        return TokenPrompt(token_ids)
    raise InvalidRequestError("a prompt is text, a list of ChatMessage or a list of token ids", field="prompt")


def request_message(request: GenerationRequest) -> inference_pb2.GenerateRequest:
    """Write a request.

    Raises:
        InvalidRequestError: a value that the message cannot hold: a negative number, text that is not Unicode.
    """
    try:
        return _request_message(request)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error


def _request_message(request: GenerationRequest) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        max_tokens=request.max_tokens,
        streaming=request.streaming,
        sampling_config=_sampling_message(request.sampling_config),
        output_config=inference_pb2.OutputConfig(
            return_log_probs=request.return_log_probs,
            num_top_log_probs=request.num_top_log_probs,
            return_prompt_log_probs=request.return_prompt_log_probs,
        ),
        stop_strings=request.stop_strings,
        stop_token_ids=request.stop_token_ids,
        include_stop=request.include_stop,
        ignore_eos=request.ignore_eos,
        bad_words=[inference_pb2.TokenSequence(token_ids=word) for word in request.bad_words],
        num_return_sequences=request.num_return_sequences,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt_id=request.cache_salt_id,
        allotted_time_ms=request.allotted_time_ms,
    )
    match request.prompt:
        case TextPrompt(text):
            message.text = text
        case ChatPrompt(messages):
            message.chat.SetInParent()
            for turn in messages:
                message.chat.messages.add(role=_role(turn.role), content=turn.content)
        case TokenPrompt(token_ids):
            message.input_token_ids.SetInParent()
            message.input_token_ids.token_ids.extend(token_ids)
    guide = request.guided_decoding_params
    if guide is not None:
        message.guided_decoding_params.guide_type = inference_pb2.GuideType.Value(f"GUIDE_TYPE_{guide.guide_type.name}")
        if guide.guide is not None:
            message.guided_decoding_params.guide = guide.guide
    lookahead = request.lookahead_config
    if lookahead is not None:
        for field in fields(lookahead):
            setattr(message.lookahead_config, field.name, getattr(lookahead, field.name))
    if request.kv_cache_retention_config is not None:
        message.kv_cache_retention_config.CopyFrom(_retention_message(request.kv_cache_retention_config))
    message.request_type = _REQUEST_TYPES[request.request_type]
    params = request.context_phase_params
    if params is not None:
        message.context_phase_params.CopyFrom(
            inference_pb2.ContextPhaseParams(
                first_gen_tokens=params.first_gen_tokens,
                req_id=params.req_id,
                opaque_state=params.opaque_state,
                draft_tokens=params.draft_tokens,
            )
        )
    return message


def _retention_message(config: KvCacheRetentionConfig) -> inference_pb2.KvCacheRetentionConfig:
    if config.directory is not None:
        field = "kv_cache_retention_config.directory"
        raise InvalidRequestError(f"{field} cannot be sent over gRPC", field=field)
    return inference_pb2.KvCacheRetentionConfig(
        token_range_retention_configs=[
            inference_pb2.TokenRangeRetentionConfig(
                token_start=part.token_start,
                token_end=part.token_end,
                priority=part.priority,
                duration_ms=_milliseconds(part.duration_ms),
            )
            for part in config.token_range_retention_configs
        ],
        decode_retention_priority=config.decode_retention_priority,
        decode_duration_ms=_milliseconds(config.decode_duration_ms),
    )


def _milliseconds(duration: timedelta | float | None) -> int | None:
    """Whole ones, at least 1: a duration of 0 would mean none."""
    if duration is None:
        return None
    return max(1, round(duration / timedelta(milliseconds=1) if isinstance(duration, timedelta) else duration))


def _sampling_message(config: SamplingConfig) -> inference_pb2.SamplingConfig:
    known = inference_pb2.SamplingConfig.DESCRIPTOR.fields_by_name
    neutral = SamplingConfig()
    message = inference_pb2.SamplingConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in known:
            if value is not None:
                setattr(message, field.name, value)
        elif value != getattr(neutral, field.name):
            raise InvalidRequestError(
                f"sampling_config.{field.name} cannot be sent over gRPC", field=f"sampling_config.{field.name}"
            )
    return message


_REQUEST_TYPES = {
    RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION: inference_pb2.REQUEST_TYPE_UNSPECIFIED,
    RequestType.REQUEST_TYPE_CONTEXT_ONLY: inference_pb2.REQUEST_TYPE_CONTEXT_ONLY,
    RequestType.REQUEST_TYPE_GENERATION_ONLY: inference_pb2.REQUEST_TYPE_GENERATION_ONLY,
}

_ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}


def _role(name: str) -> inference_pb2.Role:
    if name not in _ROLES:
        raise InvalidRequestError(
            f"role is {name!r}; it must be system, user, assistant or tool", field="chat.messages"
        )
    return _ROLES[name]


def event_of(message: inference_pb2.GenerateResponse) -> Event:
    """Read an event."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        delta = message.delta
        return Delta(
            delta.output_index,
            delta.text,
            list(delta.token_ids),
            [
                TokenLogProb(entry.log_prob, tuple((top.token_id, top.log_prob) for top in entry.top))
                for entry in delta.log_probs
            ],
        )
    if kind == "accepted":
        accepted = message.accepted
        return Accepted(accepted.request_id, accepted.prompt_tokens, tuple(accepted.executor_request_ids))
    if kind == "finished":
        finished = message.finished
        stop = finished.WhichOneof("stop_match")
        usage = finished.usage
        return Finished(
            finished.output_index,
            FinishReason(finished.finish_reason),
            None if stop is None else StopMatch(**{stop: getattr(finished, stop)}),
            Usage(usage.prompt_tokens, usage.completion_tokens, usage.reused_tokens),
            tuple(finished.prompt_log_probs),
            _context_phase_params(finished) if finished.HasField("context_phase_params") else None,
        )
    raise InvalidRequestError("the server sent an event that this client does not know; it needs a newer client")


def _context_phase_params(finished: inference_pb2.Finished) -> ContextPhaseParams:
    params = finished.context_phase_params
    return ContextPhaseParams(
        list(params.first_gen_tokens), params.req_id, params.opaque_state, list(params.draft_tokens) or None
    )


def iteration_rows(message: control_pb2.IterationTableResponse) -> list[IterationRow]:
    """Read an iteration table."""
    phases = {control_pb2.PHASE_CONTEXT: Phase.CONTEXT, control_pb2.PHASE_GENERATION: Phase.GENERATION}
    return [
        IterationRow(
            row.iteration,
            row.executor_request_id,
            phases[row.phase],
            row.num_computed_tokens,
            row.num_tokens_with_spec,
            row.reused_tokens,
            row.num_scheduled_tokens,
            row.blocks,
        )
        for row in message.rows
    ]
