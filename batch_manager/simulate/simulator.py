"""Runs the production BatchManager in virtual time: steps take what a cost model says, nothing is computed.

```
 offered requests ──► BatchManager ──► plan ──► cost model: the step ends at now + seconds
   (one at a time)        ▲                          │
                          └──── update: made-up tokens of the known lengths ◄──┘  now = end of the step
```
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.plan import IterationPlan, ScheduledRequest
from batch_manager.request import Request
from batch_manager.simulate.cost import CostModel, step_shape
from batch_manager.simulate.errors import SimulationError, SimulationStalledError
from batch_manager.simulate.workload import END_TOKEN, FILLER_TOKEN, GENERATED_TOKEN, OfferedRequest
from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.observed import ObservedBatchManager, Observer

MAX_BACKLOG = 10_000
"""While so many requests wait, later ones are not made yet, so that an overload does not fill the memory. They keep
their arrival times; only queues that let later arrivals overtake can tell."""

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


class Simulation:
    """One run in virtual time.

    Args:
        config: of the BatchManager.
        kv_config: of its blocks; None only with `MAX_REQUESTS`.
        cost: how long steps take.
        observers: watch the run; its clock starts at 0.
        speculation: None: no drafts.
    """

    def __init__(
        self,
        config: BatchManagerConfig,
        kv_config: KvCacheConfig | None,
        cost: CostModel,
        observers: Sequence[Observer] = (),
        speculation: SimulatedSpeculation | None = None,
    ) -> None:
        self._clock = ManualClock()
        clock = InstantClock(self._clock)
        self.kv = None if kv_config is None else KvCacheManager(kv_config, clock)
        self.manager = ObservedBatchManager(config, self.kv, clock, observers)
        self.num_held_back = 0
        """Requests that were made later than they arrived, see `MAX_BACKLOG`."""
        self._cost = cost
        self._outputs = _Outputs(speculation)
        self._next: OfferedRequest | None = None
        self._stopped_at = -math.inf
        """When a request was last held back."""
        self._num_offered = 0
        self._events: list[tuple[float, int]] = []
        """Cancellations and deadlines to come: time, request id."""
        self._cancels: dict[int, float] = {}
        """By live request."""

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def run(self, offered: Iterable[OfferedRequest]) -> None:
        """Offer requests, by arrival time, and run until all have ended.

        Raises:
            SimulationError: arrivals are out of order, or a request is refused for good.
            SimulationStalledError: requests wait for something that will never come.
        """
        source = iter(offered)
        self._next = next(source, None)
        engine_is_free = self.now
        in_flight: deque[tuple[IterationPlan, float]] = deque()
        while True:
            self._feed(source)
            self._cancel_due()
            while len(in_flight) < self.manager.config.max_steps_in_flight:
                plan = self.manager.schedule()
                for request in plan.timed_out:
                    self._forget(request.request_id)
                if plan.is_empty:
                    break
                begin = max(engine_is_free, self.now + self._cost.overhead)
                engine_is_free = begin + self._cost.seconds(step_shape(plan.scheduled))
                in_flight.append((plan, engine_is_free))
            if in_flight:
                plan, self._clock.now = in_flight.popleft()
                self._update(plan)
            elif not self._skip_idle_time():
                return

    def _feed(self, source: Iterator[OfferedRequest]) -> None:
        """Offer all that has arrived by now."""
        manager = self.manager
        may_be_held_back = manager.config.max_queued_requests is None
        while self._next is not None and self._next.arrival_time <= self.now:
            if may_be_held_back and manager.num_waiting >= MAX_BACKLOG:
                self._stopped_at = self.now
                return
            self._add(self._next)
            previous, self._next = self._next, next(source, None)
            if self._next is not None and self._next.arrival_time < previous.arrival_time:
                raise SimulationError(
                    f"request {self._num_offered} arrives at {self._next.arrival_time} s, before the one offered "
                    f"before it ({previous.arrival_time} s); offer requests by arrival time"
                )

    def _add(self, offered: OfferedRequest) -> None:
        request_id = self._num_offered
        self._num_offered += 1
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
        self.num_held_back += offered.arrival_time <= self._stopped_at
        try:
            self.manager.add_request(request)
        except RequestRefused:
            return  # the observers have heard of it
        self._outputs.add(request_id, offered)
        self._outputs.propose(request)
        if request.deadline is not None:
            heapq.heappush(self._events, (request.deadline, request_id))
        if offered.cancel_after is not None:
            self._cancels[request_id] = offered.arrival_time + offered.cancel_after
            heapq.heappush(self._events, (self._cancels[request_id], request_id))

    def _cancel_due(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            _, request_id = heapq.heappop(self._events)
            if self._cancels.get(request_id, self.now + 1) <= self.now:
                self.manager.cancel_request(request_id)
                self._forget(request_id)

    def _update(self, plan: IterationPlan) -> None:
        progress = self.manager.update(plan, self._outputs.sample(plan.scheduled))
        for made in progress:
            if made.finish_reason:
                self._forget(made.request.request_id)
            else:
                self._outputs.propose(made.request)

    def _forget(self, request_id: int) -> None:
        self._outputs.forget(request_id)
        self._cancels.pop(request_id, None)

    def _skip_idle_time(self) -> bool:
        """Nothing runs: go to where something happens. False: everything is over."""
        times = [self._events[0][0]] if self._events and self.manager.has_work else []
        if self._next is not None and self._next.arrival_time > self.now:
            times.append(self._next.arrival_time)
        if times:
            self._clock.now = max(self.now, min(times))
            return True
        if self.manager.has_work:
            reasons = list(self.manager.explain_all().items())
            examples = "; ".join(f"request {request_id} waits for {reason}" for request_id, reason in reasons[:3])
            raise SimulationStalledError(
                f"at {self.now} s {len(reasons)} requests wait, nothing can run, nothing else is to come: {examples}"
            )
        return False
