"""One reader of the executor's iteration statistics for everybody who wants them.

The executor hands each iteration out once. The feed takes them and passes them on: to subscribers, as the latest,
and to metrics.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from executor.api.stats import IterationStats
from executor.serving.interface import ServedExecutor

_SUBSCRIPTION_LENGTH = 1000
"""Iterations kept for a slow subscriber; older ones are dropped."""


class Subscription:
    """Iterations from the subscription on. Iterate with `async for`, inside `with`."""

    def __init__(self, feed: StatsFeed) -> None:
        self._feed = feed
        self._waiting: deque[IterationStats] = deque(maxlen=_SUBSCRIPTION_LENGTH)
        self._changed = asyncio.Event()

    def put(self, iterations: list[IterationStats]) -> None:
        self._waiting.extend(iterations)
        self._changed.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> IterationStats:
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def __enter__(self) -> Subscription:
        self._feed.add_listener(self.put)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._feed.remove_listener(self.put)


class StatsFeed:
    """Polls an executor's iteration statistics on the asyncio loop it is made on."""

    def __init__(self, executor: ServedExecutor, *, interval_seconds: float = 0.1) -> None:
        self.latest: IterationStats | None = None
        self._executor = executor
        self._interval_seconds = interval_seconds
        self._listeners: list[Callable[[list[IterationStats]], None]] = []
        self._task = asyncio.get_running_loop().create_task(self._poll())

    def subscribe(self) -> Subscription:
        return Subscription(self)

    def add_listener(self, listener: Callable[[list[IterationStats]], None]) -> None:
        """Call `listener` with each batch of new iterations, oldest first, on the asyncio loop."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[list[IterationStats]], None]) -> None:
        self._listeners.remove(listener)

    def refresh(self) -> None:
        """Take what is new now instead of at the next poll."""
        iterations = list(self._executor.get_latest_iteration_stats())
        if iterations:
            self.latest = iterations[-1]
            for listener in list(self._listeners):
                listener(iterations)

    def close(self) -> None:
        self._task.cancel()

    async def _poll(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(self._interval_seconds)
