"""What happened to whom and when, gathered while a run is watched: the data behind the trace file and the page.

```
 request 7   | queued: kv_reservation | context 0-256 | context 256-300 | generation, 40 tokens | paused | context ...
 iteration            | 11           | 12            | 13              | 14 | 15 | ...
```
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import IterationPlan, Phase, Progress, ScheduledRequest
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.request import FinishReason, Request, RequestState
from batch_manager.trace.observed import Observer


class SpanKind(StrEnum):
    QUEUED = "queued"
    CONTEXT = "context"
    GENERATION = "generation"
    STALLED = "stalled"
    """Holds blocks, but did not advance."""
    PAUSED = "paused"


class Span(NamedTuple):
    """A part of a request's life. Times are seconds on the run's clock."""

    kind: SpanKind
    begin: float
    end: float
    first_iteration: int
    last_iteration: int
    detail: str
    """Why it waited, or which tokens were computed."""


class IterationRecord(NamedTuple):
    """One iteration: counts are of requests, tokens and blocks, after planning."""

    iteration: int
    begin: float
    end: float
    num_context_requests: int
    num_generation_requests: int
    num_context_rows: int
    num_generation_rows: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    """Held by requests."""
    num_cached_blocks: int
    """Findable, held by nobody."""
    num_paused: int
    """Paused for this iteration."""


class RequestTrack:
    """One request's line in the picture."""

    def __init__(self, request: Request, now: float) -> None:
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.arrival = request.arrival_time
        self.num_prompt_tokens = request.num_prompt_tokens
        self.spans: list[Span] = []
        self.end: float | None = None
        """None: it had not ended when watching did."""
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_output_tokens = 0
        self.num_reused_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_pauses = 0
        self.first_token: float | None = None
        self._kind = SpanKind.QUEUED
        self._key: object = WaitCode.NEXT_ITERATION
        self._detail = WaitCode.NEXT_ITERATION.value
        self._begin = min(now, request.arrival_time)
        self._first_iteration = self._last_iteration = 0
        self._num_tokens = 0

    def goes_on(self, kind: SpanKind, key: object, detail: str, num_tokens: int, iteration: int, now: float) -> None:
        """In this iteration the request is in `kind`; with the same key as before it is the same span."""
        if kind is not self._kind or key != self._key:
            self.close(now)
            self._kind, self._key, self._begin = kind, key, now
            self._first_iteration = iteration
            self._num_tokens = 0
        self._detail = detail
        self._last_iteration = iteration
        self._num_tokens += num_tokens

    def close(self, now: float) -> None:
        """The current span ends."""
        if now > self._begin:
            detail = self._detail
            if self._kind is SpanKind.GENERATION:
                detail = f"{self._num_tokens} tokens computed"
            self.spans.append(Span(self._kind, self._begin, now, self._first_iteration, self._last_iteration, detail))

    def finish(self, request: Request, now: float) -> None:
        self.close(now)
        self.end = now
        self.finish_reason = request.finish_reason
        self.num_output_tokens = request.num_generated_tokens
        self.num_reused_tokens = request.receipt.num_reused_tokens
        self.num_recomputed_tokens = request.receipt.num_recomputed_tokens
        self.num_pauses = len(request.receipt.pauses)


class Timeline(Observer):
    """Gathers the first `max_iterations` iterations and the first `max_requests` requests of a run.

    What comes after is counted and otherwise left alone, so that a long run can be watched.
    """

    def __init__(self, max_iterations: int = 5_000, max_requests: int = 1_000) -> None:
        self.iterations: list[IterationRecord] = []
        self.tracks: list[RequestTrack] = []
        self.num_blocks = 0
        """Of the pool; 0 without a KV cache."""
        self.max_num_tokens = 0
        self.num_iterations = 0
        self.num_requests = 0
        self.num_refused = 0
        self._max_iterations = max_iterations
        self._max_requests = max_requests
        self._live: dict[int, tuple[Request, RequestTrack]] = {}
        self._begun: dict[int, IterationRecord] = {}
        self._in_flight: set[int] = set()
        """Requests of plans that are in flight."""
        self._manager: BatchManager | None = None
        self._kv: KvCacheManager | None = None

    @property
    def is_full(self) -> bool:
        """Whether later iterations are only counted."""
        return len(self.iterations) >= self._max_iterations

    def on_attach(self, manager: BatchManager, kv: KvCacheManager | None) -> None:
        self._manager, self._kv = manager, kv
        self.num_blocks = 0 if kv is None else kv.num_blocks
        self.max_num_tokens = manager.config.max_num_tokens

    def on_arrival(self, request: Request, held_for: WaitCode | None, now: float) -> None:  # noqa: ARG002
        self.num_requests += 1
        if len(self.tracks) < self._max_requests and not self.is_full:
            track = RequestTrack(request, now)
            self.tracks.append(track)
            self._live[request.request_id] = (request, track)

    def on_refusal(self, request: Request, held_for: WaitCode | None, refusal: RequestRefused, now: float) -> None:  # noqa: ARG002
        self.num_refused += 1

    def on_cancel(self, request_id: int, reason: FinishReason, was_live: bool, now: float) -> None:  # noqa: ARG002
        if was_live:
            self._finish(request_id, now)

    def on_abandon(self, plan: IterationPlan, ended: list[Request], now: float) -> None:
        self._end_iteration(plan, now)
        for request in ended:
            self._finish(request.request_id, now)

    def on_schedule(self, plan: IterationPlan, now: float) -> None:
        for request in plan.timed_out:
            self._finish(request.request_id, now)
        self.num_iterations += not plan.is_empty
        if self.is_full:
            return
        entries = {entry.request.request_id: entry for entry in plan.scheduled}
        for request, track in list(self._live.values()):
            entry = entries.get(request.request_id)
            if entry is not None:
                self._advance(track, entry, plan.iteration, now)
            elif request.request_id not in self._in_flight:
                self._wait(track, request, plan.iteration, now)
        if not plan.is_empty:
            self._begun[plan.iteration] = self._record(plan, now)
            self._in_flight.update(entries)

    def _advance(self, track: RequestTrack, entry: ScheduledRequest, iteration: int, now: float) -> None:
        if entry.phase is Phase.CONTEXT:
            end = entry.start + entry.num_scheduled_tokens
            detail = f"positions {entry.start} to {end} of {entry.num_tokens_with_spec}"
            if entry.num_reused_tokens:
                detail += f", {entry.num_reused_tokens} found in the cache"
            track.goes_on(SpanKind.CONTEXT, entry.start, detail, entry.num_scheduled_tokens, iteration, now)
        else:
            track.goes_on(SpanKind.GENERATION, None, "", entry.num_scheduled_tokens, iteration, now)

    def _wait(self, track: RequestTrack, request: Request, iteration: int, now: float) -> None:
        assert self._manager is not None
        reason = self._manager.explain(request.request_id)
        kind = {RequestState.RUNNING: SpanKind.STALLED, RequestState.PAUSED: SpanKind.PAUSED}.get(
            request.state, SpanKind.QUEUED
        )
        if reason is None:
            reason = WaitReason(WaitCode.NEXT_ITERATION, 0, 0)
        track.goes_on(kind, reason.code, str(reason), 0, iteration, now)

    def _record(self, plan: IterationPlan, now: float) -> IterationRecord:
        assert self._manager is not None
        contexts = [entry.num_rows for entry in plan.scheduled if entry.phase is Phase.CONTEXT]
        num_rows = plan.num_tokens - sum(contexts)
        used = cached = 0
        if self._kv is not None:
            used = self._kv.num_blocks - self._kv.num_free_blocks
            cached = self._kv.num_free_blocks - len(self._kv.pool.free)
        return IterationRecord(
            plan.iteration,
            now,
            now,
            len(contexts),
            len(plan.scheduled) - len(contexts),
            sum(contexts),
            num_rows,
            self._manager.num_running,
            self._manager.num_waiting,
            used,
            cached,
            len(plan.paused),
        )

    def on_update(
        self,
        plan: IterationPlan,
        sampled: Sequence[Sequence[int]],  # noqa: ARG002
        progress: list[Progress],
        now: float,
    ) -> None:
        self._end_iteration(plan, now)
        for made in progress:
            live = self._live.get(made.request.request_id)
            if live is None:
                continue
            if live[1].first_token is None:
                live[1].first_token = now
            if made.finish_reason is not FinishReason.NOT_FINISHED:
                self._finish(made.request.request_id, now)

    def _end_iteration(self, plan: IterationPlan, now: float) -> None:
        self._in_flight.difference_update(entry.request.request_id for entry in plan.scheduled)
        begun = self._begun.pop(plan.iteration, None)
        if begun is None:
            return
        if self.iterations:  # steps planned ahead run one after the other
            begun = begun._replace(begin=max(begun.begin, self.iterations[-1].end))
        self.iterations.append(begun._replace(end=now))
        if self.is_full:
            for _, track in self._live.values():
                track.close(now)
            self._live.clear()
            self._begun.clear()

    def _finish(self, request_id: int, now: float) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live[1].finish(live[0], now)
