"""The device blocks: which are free, which cached block holds which, which may be evicted.

```
            take                      adopt (block is full, content findable)
  free ────────────► private to a ──────────────► held by its holders
   ▲                 request                        │ last hold gone
   │  give_back        │ give_back                  ▼
   ├───────────────────┘        step in flight:  fenced ──► evictable ──► free, and the next owner's
   └──────────── fenced ◄── step in flight                     ▲  │
                                                               └──┘ found again: held
```
A block is held by those who use it and, unless an attention window lets earlier blocks go, by every held block behind
it. So nothing behind an evictable block is held, all evictable blocks can be evicted leaf by leaf, and the number of
blocks to be had is the sum of two counters.
"""

from __future__ import annotations

from collections.abc import Callable

from batch_manager.kv.block import NO_BLOCK, NOT_FENCED, CachedBlock
from batch_manager.kv.eviction import EvictionQueue, EvictionStrategy
from batch_manager.kv.expiry import ExpiryQueue
from batch_manager.kv.fences import StepFences


class BlockPool:
    """Device blocks and their states.

    Args:
        num_blocks: ids `0 .. num_blocks - 1`.
        strategy: order of eviction within a priority.
        keeps_prefix: a held block holds the blocks before it (full attention).
        expiries: told of blocks with a retention duration that become reusable.
        on_evicted: told of each cached block that lost its device block to somebody else.
        on_reusable: told of each cached block that nobody holds any more, once no step in flight can touch it.
    """

    def __init__(
        self,
        num_blocks: int,
        strategy: EvictionStrategy,
        keeps_prefix: bool,
        expiries: ExpiryQueue,
        on_evicted: Callable[[CachedBlock], None],
        on_reusable: Callable[[CachedBlock], None] | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.fences = StepFences()
        self.cached: list[CachedBlock | None] = [None] * num_blocks
        """By block id: the content that others can find, or None (free, or private to a request)."""
        self.free = list(range(num_blocks - 1, -1, -1))
        """A stack: what was given back last is taken first."""
        self.num_evictable = 0
        self.num_fenced = 0
        self.num_evictions = 0
        self.num_changes = 0
        """Times a cached block lost or changed its place: while this stands still, what was found stays there."""
        self.queue = EvictionQueue(num_blocks, strategy)
        self._keeps_prefix = keeps_prefix
        self._expiries = expiries
        self._on_evicted = on_evicted
        self._on_reusable = on_reusable
        self._tick = 0

    @property
    def num_available(self) -> int:
        return len(self.free) + self.num_evictable

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def take(self, count: int) -> list[int]:
        """`count` blocks for the caller alone; it has checked `num_available`."""
        free = self.free
        if count <= len(free):
            taken = free[len(free) - count :]
            del free[len(free) - count :]
            taken.reverse()
            return taken
        taken = free[::-1]
        free.clear()
        while len(taken) < count:
            taken.append(self._evict())
        return taken

    def give_back(self, block_id: int) -> None:
        """A private block whose owner is done with it."""
        if self.fences.in_flight:
            self.fences.newest_bucket.private_blocks.append(block_id)
            self.num_fenced += 1
        else:
            self.free.append(block_id)

    def adopt(self, node: CachedBlock, block_id: int) -> None:
        """Private block `block_id` becomes the home of `node`'s content, held once."""
        parent = node.parent
        assert parent is not None
        self.cached[block_id] = node
        node.block_id = block_id
        node.num_holds = 1
        parent.num_resident_children += 1
        if self._keeps_prefix:
            self.hold(parent)

    def hold(self, node: CachedBlock) -> None:
        """Keep `node`'s device block, and with full attention all before it, from being evicted."""
        while True:
            node.num_holds += 1
            if node.num_holds > 1:
                return
            if node.fence == NOT_FENCED:
                self.num_evictable -= 1
                if not (self._keeps_prefix and node.num_resident_children):
                    self.queue.discard(node.block_id)
            else:
                node.fence = NOT_FENCED
                self.num_fenced -= 1
            if not self._keeps_prefix:
                return
            assert node.parent is not None
            node = node.parent

    def unhold(self, node: CachedBlock) -> None:
        """Undo one `hold`; at the last one the block becomes reusable, at once or behind the steps in flight."""
        while True:
            node.num_holds -= 1
            if node.num_holds:
                return
            self._tick += 1
            node.last_used = self._tick
            if self.fences.in_flight:
                self.fences.newest_bucket.cached_blocks.append(node)
                node.fence = self.fences.latest
                self.num_fenced += 1
            else:
                self._settle(node)
            if not self._keeps_prefix:
                return
            assert node.parent is not None
            node = node.parent

    def end_step(self, iteration: int) -> None:
        """Open the fences that no step in flight needs any more."""
        for fence, released in self.fences.end(iteration).items():
            self.free.extend(released.private_blocks)
            self.num_fenced -= len(released.private_blocks)
            for node in released.cached_blocks:
                if node.fence == fence:  # else it was found again, and perhaps released again behind another fence
                    node.fence = NOT_FENCED
                    self.num_fenced -= 1
                    self._settle(node)

    def surrender(self, node: CachedBlock) -> int:
        """An evictable block with no device block behind it leaves its content; returns its block, now the caller's."""
        self.queue.discard(node.block_id)
        self.num_evictable -= 1
        return self._vacate(node)

    def forget(self, detached: list[CachedBlock]) -> None:
        """Free the device blocks of nodes that left the tree (parents first); the held and the fenced follow later."""
        for node in reversed(detached):
            if self.is_evictable(node):
                self.free.append(self.surrender(node))

    def rank_again(self, node: CachedBlock) -> None:
        """The node's retention changed."""
        if node.block_id != NO_BLOCK and node.block_id in self.queue:
            self.queue.push(node.block_id, node)

    @staticmethod
    def is_evictable(node: CachedBlock) -> bool:
        return not node.num_holds and node.fence == NOT_FENCED and node.block_id != NO_BLOCK

    def _settle(self, node: CachedBlock) -> None:
        """Neither held nor fenced any more: evictable, or free when nobody can find it."""
        if not node.is_attached:
            self.free.append(self._vacate(node))
            return
        self.num_evictable += 1
        if node.duration is not None:
            self._expiries.start(node)
        if not (self._keeps_prefix and node.num_resident_children):
            self.queue.push(node.block_id, node)
        if self._on_reusable is not None:
            self._on_reusable(node)

    def _evict(self) -> int:
        node = self.cached[self.queue.pop()]
        assert node is not None
        self.num_evictions += 1
        self.num_evictable -= 1
        block_id = self._vacate(node)
        self._on_evicted(node)
        return block_id

    def _vacate(self, node: CachedBlock) -> int:
        parent, block_id = node.parent, node.block_id
        assert parent is not None
        self.num_changes += 1
        self.cached[block_id] = None
        node.block_id = NO_BLOCK
        parent.num_resident_children -= 1
        if self._keeps_prefix and not parent.num_resident_children and self.is_evictable(parent):
            self.queue.push(parent.block_id, parent)
        return block_id
