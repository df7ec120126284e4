"""One instance in virtual time: the production BatchManager, its steps in flight, and what its requests generate."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from batch_manager.config import BatchManagerConfig
from batch_manager.kv import KvCacheManager
from batch_manager.plan import IterationPlan, Progress, ScheduledRequest
from batch_manager.request import Request
from batch_manager.simulate.cost import CostModel, step_shape
from batch_manager.simulate.errors import SimulationError
from batch_manager.simulate.workload import END_TOKEN, FILLER_TOKEN, GENERATED_TOKEN, OfferedRequest
from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.observed import ObservedBatchManager, Observer

_ONE_TOKEN = [GENERATED_TOKEN]
_NO_TOKEN: list[int] = []


@dataclass(frozen=True, slots=True)
class SimulatedSpeculation:
    """Drafts that are accepted one after the other with a fixed probability each."""

    num_draft_tokens: int
    acceptance_rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1 or not 0 <= self.acceptance_rate <= 1:
            raise SimulationError(
                f"num_draft_tokens ({self.num_draft_tokens}) must be at least 1 and acceptance_rate "
                f"({self.acceptance_rate}) within 0 and 1"
            )


class _Outputs:
    """What simulated requests generate."""

    def __init__(self, speculation: SimulatedSpeculation | None) -> None:
        self._speculation = speculation
        self._source = random.Random(speculation.seed if speculation else 0)
        self._special: dict[int, OfferedRequest] = {}
        """Live requests whose output is more than a number of equal tokens."""

    def add(self, request_id: int, offered: OfferedRequest) -> None:
        has_early_end = offered.max_new_tokens is not None and offered.max_new_tokens > offered.num_output_tokens
        if has_early_end or offered.output_token_ids:
            self._special[request_id] = offered

    def forget(self, request_id: int) -> None:
        self._special.pop(request_id, None)

    def sample(self, scheduled: list[ScheduledRequest]) -> list[list[int]]:
        """Tokens for each entry of a plan."""
        if not self._special and self._speculation is None:
            return [_ONE_TOKEN if entry.samples else _NO_TOKEN for entry in scheduled]
        return [self._tokens(entry) if entry.samples else _NO_TOKEN for entry in scheduled]

    def _tokens(self, entry: ScheduledRequest) -> list[int]:
        count = 1
        if entry.num_draft_tokens and self._speculation is not None:
            while count <= entry.num_draft_tokens and self._source.random() < self._speculation.acceptance_rate:
                count += 1
        offered = self._special.get(entry.request.request_id)
        if offered is None:
            return _ONE_TOKEN if count == 1 else _ONE_TOKEN * count
        begin = entry.request.num_generated_tokens
        tokens = list(offered.output_token_ids[begin : begin + count])
        tokens += _ONE_TOKEN * (count - len(tokens))
        last = offered.num_output_tokens - 1
        if begin <= last < begin + count and offered.num_output_tokens < entry.request.max_new_tokens:
            tokens[last - begin] = END_TOKEN
        return tokens

    def propose(self, request: Request) -> None:
        if self._speculation is not None:
            request.draft_token_ids = [FILLER_TOKEN] * self._speculation.num_draft_tokens


class SimulatedInstance:
    """A BatchManager and an engine whose steps take what a cost model says.

    Args:
        config: of the BatchManager.
        kv: its blocks; None only with `MAX_REQUESTS`.
        cost: how long steps take.
        clock: set by the caller before each call.
        instant: reads `clock`; the one that `kv` was made with.
        observers: watch the BatchManager.
        speculation: None: no drafts.
    """

    def __init__(
        self,
        config: BatchManagerConfig,
        kv: KvCacheManager | None,
        cost: CostModel,
        clock: ManualClock,
        instant: InstantClock,
        observers: Sequence[Observer] = (),
        speculation: SimulatedSpeculation | None = None,
    ) -> None:
        self.kv = kv
        self.manager = ObservedBatchManager(config, kv, instant, observers)
        self._cost = cost
        self._clock = clock
        self._outputs = _Outputs(speculation)
        self._in_flight: deque[tuple[IterationPlan, float]] = deque()
        self._engine_is_free = clock.now
        self._events: list[tuple[float, int]] = []
        """Cancellations and deadlines to come: time, request id."""
        self._cancels: dict[int, float] = {}
        """By live request."""

    @property
    def end_of_step(self) -> float | None:
        """When the oldest step in flight ends; None: there is none."""
        return self._in_flight[0][1] if self._in_flight else None

    @property
    def next_event(self) -> float | None:
        """When the next deadline or cancellation is due that may matter; None: none is."""
        return self._events[0][0] if self._events and self.manager.has_work else None

    def add(self, request_id: int, offered: OfferedRequest) -> Request:
        """Offer a request.

        Raises:
            RequestRefused: the BatchManager does not take it in; the observers have heard of it.
        """
        max_new_tokens = offered.num_output_tokens if offered.max_new_tokens is None else offered.max_new_tokens
        request = Request(
            request_id,
            offered.prompt_token_ids,
            max_new_tokens,
            end_id=END_TOKEN,
            priority=offered.priority,
            tenant=offered.tenant,
            arrival_time=offered.arrival_time,
            allotted_time=offered.allotted_time,
            cache_salt=offered.cache_salt,
            adapter_id=offered.adapter_id,
            adapter_pages=offered.adapter_pages,
        )
        self.manager.add_request(request)
        self._outputs.add(request_id, offered)
        self._outputs.propose(request)
        if request.deadline is not None:
            heapq.heappush(self._events, (request.deadline, request_id))
        if offered.cancel_after is not None:
            self._cancels[request_id] = offered.arrival_time + offered.cancel_after
            heapq.heappush(self._events, (self._cancels[request_id], request_id))
        return request

    def cancel_due(self) -> list[int]:
        """Cancel the requests whose callers have given up by now; returns their ids."""
        cancelled = []
        while self._events and self._events[0][0] <= self._clock.now:
            _, request_id = heapq.heappop(self._events)
            if self._cancels.get(request_id, self._clock.now + 1) <= self._clock.now:
                self.cancel(request_id)
                cancelled.append(request_id)
        return cancelled

    def cancel(self, request_id: int) -> None:
        self.manager.cancel_request(request_id)
        self._forget(request_id)

    def plan(self) -> list[Request]:
        """Start as many steps as may be in flight; returns requests that timed out meanwhile."""
        timed_out: list[Request] = []
        while len(self._in_flight) < self.manager.config.max_steps_in_flight:
            plan = self.manager.schedule()
            timed_out += plan.timed_out
            for request in plan.timed_out:
                self._forget(request.request_id)
            if plan.is_empty:
                break
            begin = max(self._engine_is_free, self._clock.now + self._cost.overhead)
            self._engine_is_free = begin + self._cost.seconds(step_shape(plan.scheduled))
            self._in_flight.append((plan, self._engine_is_free))
        return timed_out

    @property
    def oldest_plan(self) -> IterationPlan:
        """Of the steps in flight, of which there is one."""
        return self._in_flight[0][0]

    def end_step(self) -> list[Progress]:
        """The oldest step in flight is over; the clock stands at its end."""
        plan, _ = self._in_flight.popleft()
        progress = self.manager.update(plan, self._outputs.sample(plan.scheduled))
        for made in progress:
            if made.finish_reason:
                self._forget(made.request.request_id)
            else:
                self._outputs.propose(made.request)
        return progress

    def _forget(self, request_id: int) -> None:
        self._outputs.forget(request_id)
        self._cancels.pop(request_id, None)
