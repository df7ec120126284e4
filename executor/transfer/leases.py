"""Deadlines that are put off by heartbeats: the next one due first, whoever was put off behind it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Deadlines(Generic[_Key]):
    """When each key expires. Times are seconds on one clock. Not thread-safe."""

    def __init__(self) -> None:
        self._due: dict[_Key, float] = {}
        self._heap: list[tuple[float, int, _Key]] = []
        """An entry for each time a deadline was set; those that no longer hold are skipped when they come up."""
        self._count = 0

    def __contains__(self, key: _Key) -> bool:
        return key in self._due

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: _Key, deadline: float) -> None:
        """`key` expires at `deadline`, whatever was said before."""
        self._due[key] = deadline
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [(due, number, key) for number, (key, due) in enumerate(self._due.items())]
            self._count = len(self._heap)
            heapq.heapify(self._heap)

    def discard(self, key: _Key) -> None:
        self._due.pop(key, None)

    def pop_expired(self, now: float) -> list[_Key]:
        """Keys whose deadline is `now` or earlier; they are forgotten."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                expired.append(key)
        return expired

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline; `None`: there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
