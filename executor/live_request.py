"""A request between `enqueue_request` and its final response: turns progress into responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from batch_manager.request import FinishReason
from batch_manager.request import Request as ScheduledState
from executor.api.errors import RequestError
from executor.api.request import ContextPhaseParams, Request, RequestType
from executor.api.response import KvCacheMetrics, RequestPerfMetrics, Response, Result, Usage
from executor.context_logits import ContextLogits
from executor.sampling import SampledSequence
from executor.transfer.context_state import ContextState, GeneratedLogProb

ResponseListener = Callable[[list[Response]], None]
"""Called on the loop's thread, once an iteration with all of the iteration's responses for it. Must not block."""


class LiveSequence:
    """One of a request's `num_return_sequences` outputs: what the scheduler knows of it and what is not sent yet."""

    __slots__ = (
        "context",
        "context_phase_params",
        "cumulative_log_prob",
        "first_iteration",
        "first_scheduled_time",
        "first_token_time",
        "generation_logits",
        "given_drafts",
        "index",
        "last_token_time",
        "log_probs",
        "num_accepted_drafts",
        "num_drafts",
        "num_iterations",
        "num_sent",
        "request",
        "scheduled",
        "top_log_probs",
        "transfer",
    )

    def __init__(
        self, request: LiveRequest, scheduled: ScheduledState, index: int, context: ContextLogits | None
    ) -> None:
        self.request = request
        self.scheduled = scheduled
        self.index = index
        self.context = context
        """What is wanted of the prompt; `None` where nothing is."""
        self.given_drafts = list(scheduled.draft_token_ids)
        """The client's own."""
        self.context_phase_params: ContextPhaseParams | None = None
        """Of a context-only request, once it has ended: what goes on elsewhere."""
        self.transfer: tuple[float, float, int] | None = None
        """When its context came from another instance: start, end, bytes."""
        self.num_sent = 0
        self.log_probs: list[float] = []
        self.top_log_probs: list[list[tuple[int, float]]] = []
        self.generation_logits: list[NDArray[np.float32]] = []
        self.cumulative_log_prob = 0.0
        self.num_iterations = 0
        """Iterations in which it got tokens."""
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.first_iteration: int | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens it got in each iteration in which it got any, on average."""
        return self.scheduled.num_generated_tokens / self.num_iterations if self.num_iterations else 0.0

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether another instance generates what its client wants beyond the tokens so far."""
        request = self.request.request
        is_context_only = request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
        return is_context_only and self.scheduled.num_generated_tokens < request.max_tokens

    def take_over(self, log_probs: Sequence[GeneratedLogProb]) -> None:
        """Another instance has generated the first tokens, with these log probabilities where they are wanted."""
        self.num_iterations = 1
        self.log_probs = [entry.log_prob for entry in log_probs]
        self.top_log_probs = [entry.top for entry in log_probs]
        self.cumulative_log_prob = sum(self.log_probs)

    def note_transfer(self, start: float, end: float, num_bytes: int) -> None:
        """Its context came from another instance."""
        self.transfer = (start, end, num_bytes)

    def note_scheduled(self, iteration: int, now: float) -> bool:
        """The sequence runs in `iteration`; whether for the first time."""
        if self.first_scheduled_time is not None:
            return False
        self.first_scheduled_time = now
        self.first_iteration = iteration
        return True

    def note_tokens(self, sampled: SampledSequence, num_kept: int, num_drafts: int, now: float) -> None:
        """Take in what was sampled; only the first `num_kept` tokens count, the rest came after a stop."""
        self.num_iterations += 1
        self.num_drafts += num_drafts
        self.num_accepted_drafts += min(num_kept, num_drafts, len(sampled.token_ids) - 1)
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        if sampled.log_probs is not None:
            kept = sampled.log_probs[:num_kept]
            self.log_probs += kept
            self.cumulative_log_prob += sum(kept)
        if sampled.top_log_probs is not None:
            self.top_log_probs += sampled.top_log_probs[:num_kept]
        if sampled.generation_logits is not None:
            self.generation_logits.append(sampled.generation_logits[:num_kept])

    def response(self, finish_reason: FinishReason, iteration: int, *, is_final: bool) -> Response | None:
        """What the client is told now: nothing, while a request that does not stream goes on."""
        is_sequence_final = finish_reason is not FinishReason.NOT_FINISHED
        request = self.request.request
        if not request.streaming and not is_sequence_final:
            return None
        scheduled = self.scheduled
        num_generated = scheduled.num_generated_tokens
        sends_all = not request.streaming or request.return_all_generated_tokens
        begin = 0 if sends_all else self.num_sent
        self.num_sent = num_generated
        starts_with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
        first = 0 if starts_with_prompt else scheduled.num_prompt_tokens + begin
        result = Result(
            is_final=is_final,
            output_token_ids=[scheduled.token_ids[first:]],
            finish_reasons=[finish_reason],
            sequence_index=self.index,
            is_sequence_final=is_sequence_final,
            decoding_iter=self.num_iterations,
            avg_decoded_tokens_per_iter=self.tokens_per_iteration,
            usage=Usage(scheduled.num_prompt_tokens, num_generated, scheduled.num_reused_tokens),
        )
        result.context_phase_params = self.context_phase_params
        self._add_outputs(result, begin, sends_all)
        if request.output_config.return_perf_metrics:
            result.request_perf_metrics = self._perf_metrics(iteration, is_sequence_final)
        return Response(self.request.request_id, result, client_id=request.client_id)

    def _add_outputs(self, result: Result, begin: int, sends_all: bool) -> None:
        """Log probabilities and logits, as far as asked for, of generated tokens `begin` on."""
        output = self.request.request.output_config
        if output.return_log_probs:
            result.cum_log_probs = [self.cumulative_log_prob]
            result.log_probs = [self.log_probs[begin:]]
            if output.num_top_log_probs:
                result.top_log_probs = self.top_log_probs[begin:]
        if self.generation_logits:
            logits = np.concatenate(self.generation_logits)
            result.generation_logits = logits[:, None] if self.request.request.streaming else logits[None]
            if not sends_all:
                self.generation_logits.clear()
        if self.context is not None and self.context.is_complete:
            result.context_logits = self.context.logits
            result.prompt_log_probs = self.context.log_probs

    def _perf_metrics(self, iteration: int, is_sequence_final: bool) -> RequestPerfMetrics:
        metrics = RequestPerfMetrics(first_iter=self.first_iteration, iter=iteration)
        timing = metrics.timing_metrics
        timing.arrival_time = timedelta(seconds=self.scheduled.arrival_time)
        timing.first_scheduled_time = _duration(self.first_scheduled_time)
        timing.first_token_time = _duration(self.first_token_time)
        if self.transfer is not None:
            start, end, timing.kv_cache_size = self.transfer
            timing.kv_cache_transfer_start = _duration(start)
            timing.kv_cache_transfer_end = _duration(end)
        if is_sequence_final:
            metrics.last_iter = iteration
            timing.last_token_time = _duration(self.last_token_time)
        speculation = metrics.speculative_decoding
        speculation.total_draft_tokens = self.num_drafts
        speculation.total_accepted_draft_tokens = self.num_accepted_drafts
        speculation.acceptance_rate = self.num_accepted_drafts / self.num_drafts if self.num_drafts else 0.0
        metrics.kv_cache_metrics = self.kv_cache_metrics()
        return metrics

    def kv_cache_metrics(self) -> KvCacheMetrics:
        """What the prompt found in the cache, counted in blocks; zeros before it first runs."""
        if self.first_scheduled_time is None:
            return KvCacheMetrics()
        size = self.request.tokens_per_block
        num_blocks = -(-self.scheduled.num_prompt_tokens // size)
        num_reused = min(num_blocks, -(-self.scheduled.num_reused_tokens // size))
        num_missed = num_blocks - num_reused
        return KvCacheMetrics(num_missed, num_missed, num_reused, num_missed, num_reused / num_blocks)


class LiveRequest:
    """What a client asked for, its sequences, and who hears of them."""

    __slots__ = (
        "context_state",
        "listener",
        "num_unfinished",
        "request",
        "request_id",
        "sequences",
        "tokens_per_block",
    )

    def __init__(self, request_id: int, request: Request, listener: ResponseListener, tokens_per_block: int) -> None:
        self.request_id = request_id
        self.request = request
        self.listener = listener
        self.tokens_per_block = tokens_per_block
        self.context_state: ContextState | None = None
        """Of a generation-only request: where its context lies."""
        self.sequences: list[LiveSequence] = []
        self.num_unfinished = 0

    def add_sequence(self, scheduled: ScheduledState, context: ContextLogits | None = None) -> LiveSequence:
        sequence = LiveSequence(self, scheduled, len(self.sequences), context)
        self.sequences.append(sequence)
        self.num_unfinished += 1
        return sequence

    def error_response(self, error: RequestError) -> Response:
        """The final response of a request that failed."""
        return Response(self.request_id, error=error, client_id=self.request.client_id)


def _duration(seconds: float | None) -> timedelta:
    return timedelta(seconds=seconds or 0.0)
