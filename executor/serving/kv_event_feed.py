"""One reader of the executor's KV cache events for everybody who wants them."""

from __future__ import annotations

import asyncio

from executor.api.kv_cache import KVCacheEvent, KVCacheEventManager
from executor.serving.feed import Feed


class KvEventFeed(Feed[KVCacheEvent]):
    """Polls events while somebody listens; until then they wait in the executor's own buffer."""

    def __init__(self, manager: KVCacheEventManager, *, interval_seconds: float = 0.02) -> None:
        super().__init__()
        self._manager = manager
        self._interval_seconds = interval_seconds
        self._task = asyncio.get_running_loop().create_task(self._poll())

    def close(self) -> None:
        self._task.cancel()

    async def _poll(self) -> None:
        while True:
            if self.has_listeners:
                events = self._manager.get_latest_events(0)
                if events:
                    self.publish(events)
            await asyncio.sleep(self._interval_seconds)
