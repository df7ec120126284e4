"""What users of a run would have felt, and what it cost: counted while a run is watched, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import IterationPlan, Phase, Progress
from batch_manager.reasons import WaitCode
from batch_manager.request import FinishReason, Request
from batch_manager.simulate.histogram import Histogram
from batch_manager.trace.observed import Observer


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request must get to count as served well: seconds, `None` where it does not matter."""

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    """Mean over the request's tokens after the first."""
    end_to_end: float | None = None

    def is_met(self, first_token: float, per_token: float, end_to_end: float) -> bool:
        return (
            (self.time_to_first_token is None or first_token <= self.time_to_first_token)
            and (self.time_per_output_token is None or per_token <= self.time_per_output_token)
            and (self.end_to_end is None or end_to_end <= self.end_to_end)
        )


class _Live:
    """A request that has not ended."""

    __slots__ = ("first_token_time", "last_token_time", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.first_token_time: float | None = None
        self.last_token_time = 0.0


class RunMetrics(Observer):
    """Counts of a run. Times are seconds, on the clock of the manager that is watched.

    Latencies are those of requests that ended by themselves; counts are of all.
    """

    def __init__(self, service_level: ServiceLevel | None = None) -> None:
        self.service_level = service_level or ServiceLevel()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        """Between two deliveries to one request; several tokens accepted in one step are one delivery."""
        self.time_per_output_token = Histogram()
        """Mean of a request, over its tokens after the first."""
        self.end_to_end = Histogram()
        self.queue = Histogram()
        """From arrival to admission."""
        self.num_requests = 0
        """Taken in."""
        self.num_refused: Counter[str] = Counter()
        """By reason."""
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_served_well = 0
        self.num_pauses = 0
        self.max_pauses_per_request = 0
        self.num_prompt_tokens = 0
        """Of requests taken in."""
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_reused_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_iterations = 0
        self.num_mixed_iterations = 0
        """With context and generation requests."""
        self.num_scheduled_rows = 0
        self.num_scheduled_sequences = 0
        self.max_batch = 0
        """Most sequences in an iteration."""
        self.max_waiting = 0
        self.busy_seconds = 0.0
        """From plan to update, not counting what overlaps."""
        self.peak_used_blocks = 0
        """Held by requests, after planning."""
        self.first_arrival: float | None = None
        self.last_event = 0.0
        self._live: dict[int, _Live] = {}
        self._begun: dict[int, float] = {}
        self._last_update = 0.0
        self._manager: BatchManager | None = None
        self._kv: KvCacheManager | None = None

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last update."""
        return 0.0 if self.first_arrival is None else self.last_event - self.first_arrival

    def on_attach(self, manager: BatchManager, kv: KvCacheManager | None) -> None:
        self._manager, self._kv = manager, kv

    def on_arrival(self, request: Request, held_for: WaitCode | None, now: float) -> None:  # noqa: ARG002
        self.num_requests += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        if self.first_arrival is None or request.arrival_time < self.first_arrival:
            self.first_arrival = request.arrival_time
        self._live[request.request_id] = _Live(request)

    def on_refusal(self, request: Request, held_for: WaitCode | None, refusal: RequestRefused, now: float) -> None:  # noqa: ARG002
        self.num_refused[refusal.reason.value] += 1

    def on_cancel(self, request_id: int, reason: FinishReason, was_live: bool, now: float) -> None:  # noqa: ARG002
        if was_live:
            self._end(self._live.pop(request_id))
            self.last_event = now

    def on_abandon(self, plan: IterationPlan, ended: list[Request], now: float) -> None:
        del self._begun[plan.iteration]
        for request in ended:
            self._end(self._live.pop(request.request_id))
        self.last_event = now

    def on_schedule(self, plan: IterationPlan, now: float) -> None:
        for request in plan.timed_out:
            self._end(self._live.pop(request.request_id))
        assert self._manager is not None
        self.max_waiting = max(self.max_waiting, self._manager.num_waiting)
        if plan.is_empty:
            return
        scheduled = plan.scheduled
        self._begun[plan.iteration] = now
        self.num_iterations += 1
        self.num_mixed_iterations += scheduled[0].phase is Phase.CONTEXT and scheduled[-1].phase is Phase.GENERATION
        self.num_scheduled_rows += plan.num_tokens
        self.num_scheduled_sequences += len(scheduled)
        self.max_batch = max(self.max_batch, len(scheduled))
        if self._kv is not None:
            self.peak_used_blocks = max(self.peak_used_blocks, self._kv.num_blocks - self._kv.num_free_blocks)

    def on_update(
        self,
        plan: IterationPlan,
        sampled: Sequence[Sequence[int]],  # noqa: ARG002
        progress: list[Progress],
        now: float,
    ) -> None:
        self.busy_seconds += now - max(self._begun.pop(plan.iteration), self._last_update)
        self._last_update = self.last_event = now
        live = self._live
        gaps: dict[float, int] = {}
        for request, new_token_ids, finish_reason, _ in progress:
            state = live[request.request_id]
            self.num_output_tokens += len(new_token_ids)
            if state.first_token_time is None:
                state.first_token_time = now
            else:
                gap = now - state.last_token_time
                gaps[gap] = gaps.get(gap, 0) + 1
            state.last_token_time = now
            if finish_reason is not FinishReason.NOT_FINISHED:
                del live[request.request_id]
                self._finish(state, state.first_token_time, now)
                self._end(state)
        for gap, count in gaps.items():
            self.inter_token.add(gap, count)

    def _finish(self, state: _Live, first_token_time: float, now: float) -> None:
        """The request ended by itself."""
        request = state.request
        first = first_token_time - request.arrival_time
        end_to_end = now - request.arrival_time
        later_tokens = request.num_generated_tokens - 1
        per_token = (now - first_token_time) / later_tokens if later_tokens else 0.0
        self.time_to_first_token.add(first)
        self.end_to_end.add(end_to_end)
        if later_tokens:
            self.time_per_output_token.add(per_token)
        self.num_served_well += self.service_level.is_met(first, per_token, end_to_end)

    def _end(self, state: _Live) -> None:
        receipt = state.request.receipt
        self.num_ended[state.request.finish_reason] += 1
        self.queue.add(receipt.queue_seconds)
        self.num_pauses += len(receipt.pauses)
        self.max_pauses_per_request = max(self.max_pauses_per_request, len(receipt.pauses))
        self.num_computed_tokens += receipt.num_computed_tokens
        self.num_reused_tokens += receipt.num_reused_tokens
        self.num_recomputed_tokens += receipt.num_recomputed_tokens
