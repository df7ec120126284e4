"""One tier below the device: slots in host memory or on disk, and which cached block has a copy in which.

A copy is in one of two states: in transfer (being written, or read for somebody), or at rest. At rest it may be dropped
when nothing is lost by it (the content has another copy), or when it is a leaf: never a copy that has something behind.
"""

from __future__ import annotations

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.events import CacheTier
from batch_manager.kv.eviction import EvictionQueue, EvictionStrategy


class LowerTier:
    def __init__(self, tier: CacheTier, num_slots: int, strategy: EvictionStrategy) -> None:
        self.tier = tier
        self.num_slots = num_slots
        self.slots: dict[CachedBlock, int] = {}
        """Where each content's copy is."""
        self.nodes: list[CachedBlock | None] = [None] * num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.num_transfers = [0] * num_slots
        """By slot: transfers that read or write it now."""
        self.queue = EvictionQueue(num_slots, strategy)

    def __contains__(self, node: CachedBlock) -> bool:
        return node in self.slots

    def put(self, node: CachedBlock, slot: int) -> None:
        """`slot`, taken before, holds `node`'s content now."""
        self.slots[node] = slot
        self.nodes[slot] = node

    def drop(self, node: CachedBlock) -> None:
        """The node's copy is worth nothing any more; its slot is free once no transfer touches it."""
        slot = self.slots.pop(node)
        self.nodes[slot] = None
        self.queue.discard(slot)
        if not self.num_transfers[slot]:
            self.free.append(slot)

    def begin_transfer(self, slot: int) -> None:
        self.num_transfers[slot] += 1
        self.queue.discard(slot)

    def end_transfer(self, slot: int) -> None:
        self.num_transfers[slot] -= 1
        if not self.num_transfers[slot] and self.nodes[slot] is None:
            self.free.append(slot)
