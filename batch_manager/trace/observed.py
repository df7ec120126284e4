"""A BatchManager that others can watch: each call is one instant, and observers hear of it afterwards.

```
 caller ──► ObservedBatchManager ──► BatchManager
                   │ after each call that changed something
                   ├──► TraceWriter       (trace/)
                   ├──► RunMetrics        (simulate/)
                   └──► TimelineBuilder   (pictures/)
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import IterationPlan, Progress
from batch_manager.reasons import WaitCode
from batch_manager.request import FinishReason, Request
from batch_manager.trace.clock import InstantClock
from batch_manager.trace.observed_kv import KvCall, ObservedKvCacheManager


class Observer:
    """Hears of every call that changed something; times are the instants of the calls, in seconds.

    Calls that raised, and so changed nothing, are not told, except for refusals. Override what is wanted.
    """

    def on_attach(self, manager: BatchManager, kv: KvCacheManager | None) -> None:
        """Watching begins; nothing has been asked of `manager` yet."""

    def on_arrival(self, request: Request, held_for: WaitCode | None, now: float) -> None: ...

    def on_refusal(self, request: Request, held_for: WaitCode | None, refusal: RequestRefused, now: float) -> None: ...

    def on_release(self, request_id: int, now: float) -> None:
        """What the request was held for is there."""

    def on_restart(self, request_ids: list[int], now: float) -> None:
        """Blocks these requests waited for were lost."""

    def on_cancel(self, request_id: int, reason: FinishReason, was_live: bool, now: float) -> None: ...

    def before_schedule(self, now: float) -> None:
        """An iteration is about to be planned: drafts are as proposed, not yet cut to what fits."""

    def on_schedule(self, plan: IterationPlan, now: float) -> None: ...

    def on_update(
        self, plan: IterationPlan, sampled: Sequence[Sequence[int]], progress: list[Progress], now: float
    ) -> None: ...

    def on_abandon(self, plan: IterationPlan, ended: list[Request], now: float) -> None: ...

    def on_pause(self, now: float) -> None: ...

    def on_drain(self, now: float) -> None: ...

    def on_resume(self, now: float) -> None: ...

    def on_change_config(self, config: BatchManagerConfig, now: float) -> None: ...

    def on_kv_call(self, call: KvCall) -> None:
        """Somebody else than the BatchManager changed an `ObservedKvCacheManager`."""


class ObservedBatchManager(BatchManager):
    """A BatchManager whose calls are told to observers, in the order given.

    Args:
        config, kv: as of the BatchManager.
        clock: stands still within each call; `kv` was made with the same one.
        observers: must not call the manager back, except to ask.
    """

    def __init__(
        self,
        config: BatchManagerConfig,
        kv: KvCacheManager | None,
        clock: InstantClock,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(config, kv, clock)
        self._instant = clock
        self._observers = tuple(observers)
        if isinstance(kv, ObservedKvCacheManager):
            kv.watch(self._observers)
        for observer in self._observers:
            observer.on_attach(self, kv)

    def add_request(self, request: Request, held_for: WaitCode | None = None) -> None:
        with self._instant.instant() as now:
            try:
                super().add_request(request, held_for)
            except RequestRefused as refusal:
                for observer in self._observers:
                    observer.on_refusal(request, held_for, refusal, now)
                raise
        for observer in self._observers:
            observer.on_arrival(request, held_for, now)

    def release_hold(self, request_id: int) -> None:
        with self._instant.instant() as now:
            super().release_hold(request_id)
        for observer in self._observers:
            observer.on_release(request_id, now)

    def restart(self, requests: Iterable[Request]) -> None:
        restarted = list(requests)
        with self._instant.instant() as now:
            super().restart(restarted)
        request_ids = [request.request_id for request in restarted]
        for observer in self._observers:
            observer.on_restart(request_ids, now)

    def cancel_request(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        with self._instant.instant() as now:
            was_live = super().cancel_request(request_id, reason)
        for observer in self._observers:
            observer.on_cancel(request_id, reason, was_live, now)
        return was_live

    def schedule(self) -> IterationPlan:
        with self._instant.instant() as now:
            for observer in self._observers:
                observer.before_schedule(now)
            plan = super().schedule()
        for observer in self._observers:
            observer.on_schedule(plan, now)
        return plan

    def update(self, plan: IterationPlan, sampled: Sequence[Sequence[int]]) -> list[Progress]:
        with self._instant.instant() as now:
            progress = super().update(plan, sampled)
        if not plan.is_empty:
            for observer in self._observers:
                observer.on_update(plan, sampled, progress, now)
        return progress

    def abandon(self, plan: IterationPlan) -> list[Request]:
        with self._instant.instant() as now:
            ended = super().abandon(plan)
        if not plan.is_empty:
            for observer in self._observers:
                observer.on_abandon(plan, ended, now)
        return ended

    def pause(self) -> None:
        with self._instant.instant() as now:
            super().pause()
        for observer in self._observers:
            observer.on_pause(now)

    def drain(self) -> None:
        with self._instant.instant() as now:
            super().drain()
        for observer in self._observers:
            observer.on_drain(now)

    def resume(self) -> None:
        with self._instant.instant() as now:
            super().resume()
        for observer in self._observers:
            observer.on_resume(now)

    def change_config(self, config: BatchManagerConfig) -> None:
        with self._instant.instant() as now:
            super().change_config(config)
        for observer in self._observers:
            observer.on_change_config(config, now)
