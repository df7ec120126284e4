"""One reader of the executor's iteration statistics for everybody who wants them: the executor hands each iteration
out once."""

from __future__ import annotations

import asyncio

from executor.api.stats import IterationStats
from executor.serving.feed import Feed
from executor.serving.interface import ServedExecutor


class StatsFeed(Feed[IterationStats]):
    """Polls an executor's iteration statistics on the asyncio loop it is made on."""

    def __init__(self, executor: ServedExecutor, *, interval_seconds: float = 0.1) -> None:
        super().__init__()
        self.latest: IterationStats | None = None
        self._executor = executor
        self._interval_seconds = interval_seconds
        self._task = asyncio.get_running_loop().create_task(self._poll())

    def refresh(self) -> None:
        """Take what is new now instead of at the next poll."""
        iterations = self._executor.get_latest_iteration_stats()
        if iterations:
            self.latest = iterations[-1]
            self.publish(iterations)

    def close(self) -> None:
        self._task.cancel()

    async def _poll(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(self._interval_seconds)
