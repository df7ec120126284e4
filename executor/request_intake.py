"""From a request to what the scheduler and the sampler need; what does not fit the engine is refused here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batch_manager import RefusalReason, RequestRefused
from batch_manager import Request as ScheduledState
from batch_manager.kv import KvCacheRetentionConfig
from executor.api.config import ExecutorConfig
from executor.api.errors import DuplicateRequestError, InvalidRequestError, QueueFullError, RequestError
from executor.api.request import Request, RequestType
from executor.context_logits import ContextLogits
from executor.engines.interface import EngineSpec
from executor.live_request import LiveRequest, ResponseListener
from executor.sampling import SamplingSpec
from executor.sampling_spec import PostProcessors, sampling_spec
from executor.speculation.drafter import check_lookahead_config
from executor.transfer.intake import ContextIntake

if TYPE_CHECKING:
    from concurrent.futures import Future

    from executor.sampling.grammar import CompiledGrammar
    from executor.sampling.grammar_compiler import GrammarCompiler


class Submission(NamedTuple):
    """A checked request on its way into the loop."""

    live: LiveRequest
    specs: list[SamplingSpec]
    """How each of its sequences is sampled; without their grammars."""
    grammar: Future[CompiledGrammar] | None
    """What the request has to wait for."""


class RequestIntake:
    """Checks requests and takes them apart into sequences. Safe to use from any thread."""

    def __init__(
        self,
        config: ExecutorConfig,
        spec: EngineSpec,
        grammars: GrammarCompiler | None,
        contexts: ContextIntake,
    ) -> None:
        self._post_processors = PostProcessors(config.logits_post_processor_config)
        self._spec = spec
        self._grammars = grammars
        self._contexts = contexts

    def accept(
        self, request: Request, request_id: int, next_id: Callable[[], int], listener: ResponseListener
    ) -> Submission:
        """Check a request and take it apart.

        Args:
            request: as the client gave it.
            request_id: also the scheduler's id of its first sequence.
            next_id: gives the ids of the other ones.
            listener: who gets its responses.

        Raises:
            RequestError: names the field that is wrong or refused. Nothing has changed.
        """
        request.validate()
        prompt = self._checked_prompt(request)
        drafts = self._checked_drafts(request)
        if request.lookahead_config is not None:
            check_lookahead_config(request.lookahead_config)
        if request.guided_decoding_params is not None and self._grammars is None:
            raise InvalidRequestError(
                "guided_decoding_params is set; the executor was opened without a guided_decoding_config",
                field="guided_decoding_params",
            )
        live = LiveRequest(request_id, request, listener, self._spec.tokens_per_block)
        live.context_state = self._contexts.accept(request, prompt, self._spec.vocab_size)
        specs = []
        for index in range(request.num_sequences):
            scheduled = self._scheduled(request, prompt, request_id if index == 0 else next_id())
            scheduled.draft_token_ids = list(drafts)
            sequence = live.add_sequence(scheduled, self._context_logits(request, prompt))
            if live.context_state is not None:
                sequence.take_over(live.context_state.log_probs)
            specs.append(
                sampling_spec(request, prompt, self._post_processors, self._spec.vocab_size, sequence_index=index)
            )
        grammar = None
        if request.guided_decoding_params is not None and self._grammars is not None:
            grammar = self._grammars.submit(request.guided_decoding_params)
        return Submission(live, specs, grammar)

    def _checked_prompt(self, request: Request) -> list[int]:
        spec = self._spec
        prompt = _token_ids("input_token_ids", request.input_token_ids, spec.vocab_size)
        if len(prompt) > spec.max_input_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; the engine's max_input_len is {spec.max_input_len}",
                field="input_token_ids",
            )
        if len(prompt) + request.max_tokens > spec.max_seq_len:
            raise InvalidRequestError(
                f"prompt ({len(prompt)}) and max_tokens ({request.max_tokens}) make "
                f"{len(prompt) + request.max_tokens} tokens; the engine's max_seq_len is {spec.max_seq_len}",
                field="max_tokens",
            )
        return prompt

    def _checked_drafts(self, request: Request) -> list[int]:
        config = request.external_draft_tokens_config
        if config is None:
            params = request.context_phase_params
            handed_on = [] if params is None else params.draft_tokens or []
            return _token_ids("context_phase_params.draft_tokens", handed_on, self._spec.vocab_size)
        field = "external_draft_tokens_config.tokens"
        drafts = _token_ids(field, config.tokens, self._spec.vocab_size)
        if not drafts:
            raise InvalidRequestError(f"{field} is empty; leave the configuration out instead", field=field)
        return drafts

    def _scheduled(self, request: Request, prompt: list[int], sequence_id: int) -> ScheduledState:
        stop_words = request.stop_words or []
        cache_salt = request.cache_salt_id
        retention: KvCacheRetentionConfig | None = request.kv_cache_retention_config
        if request.wants_context:
            # Every position has to be computed, so nothing may be found in the cache, and what is stored is worth
            # nothing to others.
            cache_salt = -1 - sequence_id
            retention = retention or _WORTHLESS
        params = request.context_phase_params
        is_context_only = request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
        return ScheduledState(
            sequence_id,
            prompt,
            1 if is_context_only else request.max_tokens,
            end_id=request.effective_end_id,
            stop_token_ids=[word[0] for word in stop_words if len(word) == 1],
            stop_words=[word for word in stop_words if len(word) > 1],
            min_new_tokens=request.sampling_config.min_tokens or 0,
            priority=request.priority,
            tenant=request.tenant,
            arrival_time=time.monotonic(),
            allotted_time=request.allotted_time_seconds,
            cache_salt=cache_salt,
            retention=retention,
            generated_token_ids=() if params is None else params.first_gen_tokens,
            num_remote_tokens=0 if params is None else len(prompt),
        )

    def _context_logits(self, request: Request, prompt: list[int]) -> ContextLogits | None:
        if not request.wants_context:
            return None
        output = request.output_config
        return ContextLogits(
            prompt,
            self._spec.vocab_size,
            wants_logits=output.return_context_logits,
            wants_log_probs=output.return_prompt_log_probs,
        )


_WORTHLESS = KvCacheRetentionConfig(
    [KvCacheRetentionConfig.TokenRangeRetentionConfig(0, priority=0)], decode_retention_priority=0
)


def request_error(refusal: RequestRefused) -> RequestError:
    """The scheduler's refusal as the client's error."""
    if refusal.reason in (RefusalReason.QUEUE_FULL_REQUESTS, RefusalReason.QUEUE_FULL_TOKENS):
        return QueueFullError(str(refusal))
    if refusal.reason is RefusalReason.DUPLICATE_ID:
        return DuplicateRequestError(str(refusal))
    return InvalidRequestError(str(refusal))


def _token_ids(name: str, token_ids: Sequence[int] | Any, vocab_size: int) -> list[int]:
    """As Python integers, checked."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        ids = np.empty(0, object)
    if ids.size == 0 and ids.dtype.kind != "O":
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name} must be a list of integers", field=name)
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidRequestError(f"{name}[{at}] is {ids[at]}; token ids are in [0, {vocab_size})", field=name)
    checked: list[int] = ids.tolist()
    return checked
