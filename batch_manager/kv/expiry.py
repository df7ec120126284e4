"""Priorities that end: when a block has been reusable for its duration, it falls back to the default priority."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from batch_manager.kv.block import CachedBlock


class ExpiryQueue:
    """Blocks whose priority ends at some time; the clock starts anew each time a block becomes reusable.

    Entries whose block was found and released again since are dead, and swept when they outnumber the living.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, CachedBlock]] = []
        self._num_entries = 0
        self._sweep_at = 64

    def start(self, node: CachedBlock) -> None:
        """`node` (with a duration) has just become reusable."""
        assert node.duration is not None
        node.expires_at = self._clock() + node.duration
        self._num_entries += 1
        heappush(self._heap, (node.expires_at, self._num_entries, node))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64

    def due(self) -> Iterator[CachedBlock]:
        """Removes and yields the blocks whose time is over."""
        if not self._heap:
            return
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if self._is_live(entry):
                entry[2].expires_at = None
                yield entry[2]

    @staticmethod
    def _is_live(entry: tuple[float, int, CachedBlock]) -> bool:
        node = entry[2]
        return node.is_attached and not node.num_holds and node.expires_at == entry[0]
