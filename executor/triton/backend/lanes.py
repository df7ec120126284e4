"""Sends responses on several threads: Triton acknowledges each one before its sender may go on.

```
frame ── events by row ──► lane 0 ── thread        a row is always on the same lane, so its responses stay in order
                       └─► lane 1 ── thread
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_NUM_LANES = 8

Deliver = Callable[[list[list[Any]], memoryview], None]


class Lanes:
    """Hands events on to `deliver`, those of different rows at the same time."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._queues: list[SimpleQueue[tuple[list[list[Any]], memoryview] | None]] = [
            SimpleQueue() for _ in range(_NUM_LANES)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=[queue], name="lane", daemon=True) for queue in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def put(self, events: list[list[Any]], body: memoryview) -> None:
        """Queue events, each of which begins with the key of its row."""
        by_lane: list[list[list[Any]]] = [[] for _ in range(_NUM_LANES)]
        for event in events:
            by_lane[event[0] % _NUM_LANES].append(event)
        for queue, some in zip(self._queues, by_lane, strict=True):
            if some:
                queue.put((some, body))

    def close(self) -> None:
        """End the threads once what is queued has been sent."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self, queue: SimpleQueue[tuple[list[list[Any]], memoryview] | None]) -> None:
        while self._deliver_next(queue):
            pass

    def _deliver_next(self, queue: SimpleQueue[tuple[list[list[Any]], memoryview] | None]) -> bool:
        """One entry; False: it was the last. Keeps nothing of it while it waits for the next."""
        entry = queue.get()
        if entry is not None:
            self._deliver(*entry)
        return entry is not None
