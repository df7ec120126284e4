"""Which cached block goes first: lowest priority, and within a priority what the strategy says."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from heapq import heapify, heappop, heappush

from batch_manager.kv.block import CachedBlock

Rank = int | tuple[int, int]
"""Lower goes first. One strategy's ranks are all of one type."""

PROTECTED_HITS = 1
"""SLRU: a block that was found this often has left the probationary segment."""


class EvictionStrategy(StrEnum):
    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    MRU = "mru"
    SLRU = "slru"


def least_recently_used(block: CachedBlock) -> Rank:
    return block.last_used


def least_frequently_used(block: CachedBlock) -> Rank:
    return block.num_hits, block.last_used


def first_in_first_out(block: CachedBlock) -> Rank:
    return block.created


def most_recently_used(block: CachedBlock) -> Rank:
    return -block.last_used


def segmented_least_recently_used(block: CachedBlock) -> Rank:
    return int(block.num_hits >= PROTECTED_HITS), block.last_used


STRATEGIES: dict[EvictionStrategy, Callable[[CachedBlock], Rank]] = {
    EvictionStrategy.LRU: least_recently_used,
    EvictionStrategy.LFU: least_frequently_used,
    EvictionStrategy.FIFO: first_in_first_out,
    EvictionStrategy.MRU: most_recently_used,
    EvictionStrategy.SLRU: segmented_least_recently_used,
}


class EvictionQueue:
    """The slots of one tier that may be evicted, in order.

    A heap with lazy removal: each slot has the ticket of its latest entry, entries with another ticket are dead. Dead
    entries are swept when they outnumber the living, so the heap stays in proportion to what it holds.
    """

    def __init__(self, num_slots: int, strategy: EvictionStrategy) -> None:
        self._rank = STRATEGIES[strategy]
        self._tickets = [0] * num_slots
        self._next_ticket = 1
        self._heap: list[tuple[int, Rank, int, int]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, slot: int) -> bool:
        return self._tickets[slot] != 0

    def push(self, slot: int, block: CachedBlock) -> None:
        """Queue `slot`, which holds `block`, at its present rank; a slot already queued moves to that rank."""
        if not self._tickets[slot]:
            self._num_live += 1
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._tickets[slot] = ticket
        heappush(self._heap, (block.priority, self._rank(block), ticket, slot))
        if len(self._heap) > 2 * self._num_live + 64:
            self._sweep()

    def discard(self, slot: int) -> None:
        """Take `slot` out if it is queued."""
        if self._tickets[slot]:
            self._tickets[slot] = 0
            self._num_live -= 1

    def pop(self) -> int:
        """Remove and return the slot that goes first. Raises `IndexError` when nothing is queued."""
        while True:
            _, _, ticket, slot = heappop(self._heap)
            if self._tickets[slot] == ticket:
                self._tickets[slot] = 0
                self._num_live -= 1
                return slot

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._tickets[entry[3]] == entry[2]]
        heapify(self._heap)
