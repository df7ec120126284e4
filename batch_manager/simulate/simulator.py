"""Runs the production BatchManager in virtual time: steps take what a cost model says, nothing is computed.

```
 offered requests ──► BatchManager ──► plan ──► cost model: the step ends at now + seconds
   (one at a time)        ▲                          │
                          └──── update: made-up tokens of the known lengths ◄──┘  now = end of the step
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.simulate.cost import CostModel
from batch_manager.simulate.errors import SimulationError, SimulationStalledError
from batch_manager.simulate.instance import SimulatedInstance, SimulatedSpeculation
from batch_manager.simulate.workload import OfferedRequest
from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.observed import ObservedBatchManager, Observer

MAX_BACKLOG = 10_000
"""While so many requests wait, later ones are not made yet, so that an overload does not fill the memory. They keep
their arrival times; only queues that let later arrivals overtake can tell."""


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
        self._instance = SimulatedInstance(config, self.kv, cost, self._clock, clock, observers, speculation)
        self.num_held_back = 0
        """Requests that were made later than they arrived, see `MAX_BACKLOG`."""
        self._next: OfferedRequest | None = None
        self._stopped_at = -math.inf
        """When a request was last held back."""
        self._num_offered = 0

    @property
    def manager(self) -> ObservedBatchManager:
        return self._instance.manager

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
        instance = self._instance
        while True:
            self._feed(source)
            instance.cancel_due()
            instance.plan()
            if (end := instance.end_of_step) is not None:
                self._clock.now = end
                instance.end_step()
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
                raise out_of_order(self._num_offered, self._next, previous)

    def _add(self, offered: OfferedRequest) -> None:
        self.num_held_back += offered.arrival_time <= self._stopped_at
        self._num_offered += 1
        with suppress(RequestRefused):  # the observers have heard of it
            self._instance.add(self._num_offered - 1, offered)

    def _skip_idle_time(self) -> bool:
        """Nothing runs: go to where something happens. False: everything is over."""
        event = self._instance.next_event
        times = [] if event is None else [event]
        if self._next is not None and self._next.arrival_time > self.now:
            times.append(self._next.arrival_time)
        if times:
            self._clock.now = max(self.now, min(times))
            return True
        if self.manager.has_work:
            raise stalled(self.now, self.manager)
        return False


def out_of_order(number: int, request: OfferedRequest, previous: OfferedRequest) -> SimulationError:
    return SimulationError(
        f"request {number} arrives at {request.arrival_time} s, before the one offered "
        f"before it ({previous.arrival_time} s); offer requests by arrival time"
    )


def stalled(now: float, manager: BatchManager) -> SimulationStalledError:
    reasons = list(manager.explain_all().items())
    examples = "; ".join(f"request {request_id} waits for {reason}" for request_id, reason in reasons[:3])
    return SimulationStalledError(
        f"at {now} s {len(reasons)} requests wait, nothing can run, nothing else is to come: {examples}"
    )
