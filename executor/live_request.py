"""A request between `enqueue_request` and its final response: turns progress into responses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import numpy as np

from batch_manager.request import FinishReason
from batch_manager.request import Request as ScheduledState
from executor.api.errors import RequestError
from executor.api.request import Request
from executor.api.response import RequestPerfMetrics, Response, Result, Usage
from executor.sampling import SampledSequence

_T = TypeVar("_T")

ResponseListener = Callable[[list[Response]], None]
"""Called on the loop's thread, once an iteration with all of the iteration's responses for it. Must not block."""


class LiveSequence:
    """One of a request's `num_return_sequences` outputs: what the scheduler knows of it and what is not sent yet."""

    __slots__ = (
        "cumulative_log_prob",
        "first_iteration",
        "first_scheduled_time",
        "first_token_time",
        "generation_logits",
        "index",
        "last_iteration",
        "last_token_time",
        "log_probs",
        "num_accepted_drafts",
        "num_drafts",
        "num_iterations",
        "num_sent",
        "request",
        "scheduled",
        "top_log_probs",
    )

    def __init__(self, request: LiveRequest, scheduled: ScheduledState, index: int) -> None:
        self.request = request
        self.scheduled = scheduled
        self.index = index
        self.num_sent = 0
        self.log_probs: list[float] = []
        self.top_log_probs: list[list[tuple[int, float]]] = []
        self.generation_logits: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        self.cumulative_log_prob = 0.0
        self.num_iterations = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.first_iteration: int | None = None
        self.last_iteration: int | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    def note_scheduled(self, iteration: int, now: float) -> None:
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
            self.first_iteration = iteration

    def note_tokens(self, sampled: SampledSequence, num_kept: int, num_drafts: int, iteration: int, now: float) -> None:
        """Take in what was sampled; only the first `num_kept` tokens count, the rest came after a stop."""
        self.num_iterations += 1
        self.num_drafts += num_drafts
        self.num_accepted_drafts += min(num_kept, num_drafts, len(sampled.token_ids) - 1)
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.last_iteration = iteration
        if sampled.log_probs is not None:
            kept = sampled.log_probs[:num_kept]
            self.log_probs += kept
            self.cumulative_log_prob += sum(kept)
        if sampled.top_log_probs is not None:
            self.top_log_probs += sampled.top_log_probs[:num_kept]
        if sampled.generation_logits is not None:
            self.generation_logits.append(sampled.generation_logits[:num_kept].copy())

    def response(self, finish_reason: FinishReason, iteration: int, *, is_final: bool) -> Response | None:
        """What the client is told now: nothing, while a request that does not stream goes on."""
        is_sequence_final = finish_reason is not FinishReason.NOT_FINISHED
        request = self.request.request
        if not request.streaming and not is_sequence_final:
            return None
        scheduled = self.scheduled
        generated = scheduled.token_ids[scheduled.num_prompt_tokens :]
        num_new = len(generated) - self.num_sent
        if request.streaming:
            token_ids = generated if request.return_all_generated_tokens else generated[self.num_sent :]
        elif request.output_config.exclude_input_from_output:
            token_ids = generated
        else:
            token_ids = list(scheduled.token_ids)
        self.num_sent = len(generated)

        result = Result(
            is_final=is_final,
            output_token_ids=[token_ids],
            finish_reasons=[finish_reason],
            sequence_index=self.index,
            is_sequence_final=is_sequence_final,
            decoding_iter=iteration,
            avg_decoded_tokens_per_iter=len(generated) / self.num_iterations if self.num_iterations else 0.0,
            usage=Usage(scheduled.num_prompt_tokens, len(generated), scheduled.num_reused_tokens),
        )
        only_new = request.streaming and not request.return_all_generated_tokens
        if request.output_config.return_log_probs:
            result.cum_log_probs = [self.cumulative_log_prob]
            result.log_probs = [_tail(self.log_probs, num_new if only_new else None)]
            if self.top_log_probs:
                result.top_log_probs = _tail(self.top_log_probs, num_new if only_new else None)
        if request.output_config.return_generation_logits and self.generation_logits:
            logits = np.concatenate(self.generation_logits)
            result.generation_logits = logits[None, -num_new:] if only_new else logits[None]
            if only_new:
                self.generation_logits.clear()
        if is_sequence_final and request.output_config.return_perf_metrics:
            result.request_perf_metrics = self._perf_metrics(iteration)
        return Response(self.request.request_id, result, client_id=request.client_id)

    def _perf_metrics(self, iteration: int) -> RequestPerfMetrics:
        metrics = RequestPerfMetrics(first_iter=self.first_iteration, last_iter=self.last_iteration, iter=iteration)
        timing = metrics.timing_metrics
        timing.arrival_time = timedelta(seconds=self.scheduled.arrival_time)
        timing.first_scheduled_time = _duration(self.first_scheduled_time)
        timing.first_token_time = _duration(self.first_token_time)
        timing.last_token_time = _duration(self.last_token_time)
        speculation = metrics.speculative_decoding
        speculation.total_draft_tokens = self.num_drafts
        speculation.total_accepted_draft_tokens = self.num_accepted_drafts
        speculation.acceptance_rate = self.num_accepted_drafts / self.num_drafts if self.num_drafts else 0.0
        kv = metrics.kv_cache_metrics
        tokens_per_block = self.request.tokens_per_block
        kv.num_reused_blocks = self.scheduled.num_reused_tokens // tokens_per_block
        kv.num_total_allocated_blocks = -(-(len(self.scheduled.token_ids) - 1) // tokens_per_block)
        kv.num_new_allocated_blocks = kv.num_total_allocated_blocks - kv.num_reused_blocks
        kv.num_missed_blocks = -(-self.scheduled.num_prompt_tokens // tokens_per_block) - kv.num_reused_blocks
        looked_up = kv.num_reused_blocks + kv.num_missed_blocks
        kv.kv_cache_hit_rate = kv.num_reused_blocks / looked_up if looked_up else 0.0
        return metrics


class LiveRequest:
    """What a client asked for, its sequences, and who hears of them."""

    __slots__ = ("listener", "num_unfinished", "request", "request_id", "sequences", "tokens_per_block")

    def __init__(self, request_id: int, request: Request, listener: ResponseListener, tokens_per_block: int) -> None:
        self.request_id = request_id
        self.request = request
        self.listener = listener
        self.tokens_per_block = tokens_per_block
        self.sequences: list[LiveSequence] = []
        self.num_unfinished = 0

    def add_sequence(self, scheduled: ScheduledState) -> LiveSequence:
        sequence = LiveSequence(self, scheduled, len(self.sequences))
        self.sequences.append(sequence)
        self.num_unfinished += 1
        return sequence

    def error_response(self, error: RequestError) -> Response:
        """The final response of a request that failed."""
        return Response(self.request_id, error=error, client_id=self.request.client_id)


def _tail(values: list[_T], count: int | None) -> list[_T]:
    """The last `count` values, or all of them."""
    return list(values) if count is None else values[len(values) - count :]


def _duration(seconds: float | None) -> timedelta:
    return timedelta(seconds=seconds or 0.0)
