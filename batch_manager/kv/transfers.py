"""Copies between tiers: which blocks are backed up below the device, which are brought back, and what waits for it.

```
device   a ── b ── c        evicted: c, then b, then a       (a leaf at a time)
              │ offload (a first, then b, then c): ordered while blocks are cached and still in place,
host     a ── b ── c        so an eviction never waits for a copy
              │ spill
disk     a ── b ── c        dropped: c, then b, then a
```
Below the device, too, what is behind a block is there only while the block is: every lower copy's parent has a lower
copy. The executor takes orders, carries them out in any way it likes while the engine computes, and acknowledges each
once, those to one tier in the order they were given. Until then both ends stay as they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from batch_manager.kv.block import NO_BLOCK, CachedBlock
from batch_manager.kv.errors import BlockOwnershipError
from batch_manager.kv.events import CacheTier
from batch_manager.kv.pool import BlockPool
from batch_manager.kv.tiers import LowerTier


class BlockTransfer(NamedTuple):
    """Copy one block's bytes from one tier to another. Slots of the device tier are block ids."""

    transfer_id: int
    source_tier: CacheTier
    source_slot: int
    target_tier: CacheTier
    target_slot: int
    block_hash: bytes
    """[32] what the bytes are; a disk block is stored under it and checked against it."""


class TransferCounts(NamedTuple):
    """Acknowledged so far."""

    offloaded: int
    onboarded: int
    failed: int


NO_TRANSFERS = TransferCounts(0, 0, 0)


class TierTransfers:
    """The lower tiers and the copies in flight.

    Args:
        pool: the device blocks.
        tiers: the tiers below, nearest first.
        min_priority: blocks below it are not kept when the device needs their space, nor is anything behind them.
        free_fraction: a tier is backed up below while less than this fraction of it is free.
        max_orders: offloads and spills handed out at a time.
        remove: takes a block and all behind it out of the tree, and calls `forget` for each.
        on_moved: told of each block whose nearest tier changed: block, old, new.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: list[LowerTier],
        min_priority: int,
        free_fraction: float,
        max_orders: int,
        remove: Callable[[CachedBlock], None],
        on_moved: Callable[[CachedBlock, CacheTier, CacheTier], None],
    ) -> None:
        self._pool = pool
        self.tiers = tiers
        self._by_tier = {tier.tier: tier for tier in tiers}
        self._min_priority = min_priority
        self._free_fraction = free_fraction
        self._max_orders = max_orders
        self._remove = remove
        self._on_moved = on_moved
        self._next_id = 1
        self._orders: list[BlockTransfer] = []
        """Given by `onboard`, not taken yet."""
        self.in_flight: dict[int, tuple[BlockTransfer, CachedBlock]] = {}
        self._offload_candidates: OrderedDict[CachedBlock, None] = OrderedDict()
        """Deepest blocks of cached prefixes, the one released first at the front."""
        self._spill_candidates: deque[CachedBlock] = deque()
        self.offloading: set[CachedBlock] = set()
        self.loading: dict[CachedBlock, int] = {}
        """Blocks whose device copy is being written -> the transfer."""
        self.num_backed_children: dict[CachedBlock, int] = {}
        """Children that have a lower copy, or are being offloaded: a parent's copies must not go before theirs."""
        self._awaited: dict[int, set[int]] = {}
        """Request id -> transfers it waits for."""
        self.counts = NO_TRANSFERS

    # What is where

    def lower_tier(self, node: CachedBlock) -> LowerTier | None:
        """The nearest lower tier that has a copy."""
        for tier in self.tiers:
            if node in tier:
                return tier
        return None

    def nearest(self, node: CachedBlock) -> CacheTier | None:
        """The nearest tier whose copy can be read now."""
        if node.block_id != NO_BLOCK and node not in self.loading:
            return CacheTier.DEVICE
        tier = self.lower_tier(node)
        return None if tier is None else tier.tier

    def on_reusable(self, node: CachedBlock) -> None:
        """Nobody holds `node` any more."""
        if not node.num_resident_children and self.lower_tier(node) is None:
            self._offload_candidates[node] = None
            self._offload_candidates.move_to_end(node)

    def on_evicted(self, node: CachedBlock) -> CacheTier | None:
        """`node` lost its device block; returns the tier that still has it."""
        self._offload_candidates.pop(node, None)
        return self.nearest(node)

    def forget(self, node: CachedBlock) -> None:
        """`node` left the tree."""
        self._offload_candidates.pop(node, None)
        if node in self.offloading or self.lower_tier(node) is not None:
            self._count_backed_child(node, -1)
        for tier in self.tiers:
            if node in tier:
                tier.drop(node)

    # Loads

    def onboard(self, node: CachedBlock, block_id: int) -> None:
        """Order a copy from the nearest lower tier into private block `block_id`, which becomes the node's."""
        tier = self.lower_tier(node)
        assert tier is not None
        slot = tier.slots[node]
        tier.begin_transfer(slot)
        self._pool.adopt(node, block_id)
        self._pool.num_changes += 1
        order = self._order(node, tier.tier, slot, CacheTier.DEVICE, block_id)
        self.loading[node] = order.transfer_id
        self._orders.append(order)

    def wait_for(self, request_id: int, path: list[CachedBlock]) -> None:
        """The request cannot run before all of `path` is loaded."""
        awaited = {self.loading[node] for node in path if node in self.loading}
        if awaited:
            self._awaited[request_id] = awaited

    def is_loading(self, request_id: int) -> bool:
        return request_id in self._awaited

    def num_blocks_held(self) -> int:
        """Device blocks that nobody but transfers holds: to be had once those are acknowledged."""
        explained: Counter[CachedBlock] = Counter()
        count = 0
        for tip in (*self.offloading, *self.loading):
            node: CachedBlock | None = tip
            while node is not None and node.block_id != NO_BLOCK:
                explained[node] += 1
                if explained[node] < node.num_holds:  # by somebody else, or by a block behind it that is still to come
                    break
                count += 1
                node = node.parent
        return count

    def stop_waiting(self, request_id: int) -> None:
        self._awaited.pop(request_id, None)

    # Orders and acknowledgements

    def take_orders(self) -> list[BlockTransfer]:
        orders, self._orders = self._orders, []
        budget = self._max_orders
        while budget and self._offload_candidates and self._is_short(len(self._pool.free), self._pool.num_blocks):
            tip, _ = self._offload_candidates.popitem(last=False)
            offloads = self._offload_prefix(tip, budget)
            budget -= len(offloads)
            orders += offloads
            if tip in self._offload_candidates:  # the rest of it is next
                break
        for tier, below in zip(self.tiers, self.tiers[1:], strict=False):
            while budget and self._spill_candidates and self._is_short(len(tier.free), tier.num_slots):
                node = self._spill_candidates.popleft()
                if node in tier and node not in below:
                    slot = self._take_slot(below)
                    if slot is None:
                        break
                    below.begin_transfer(slot)
                    tier.begin_transfer(tier.slots[node])
                    orders.append(self._order(node, tier.tier, tier.slots[node], below.tier, slot))
                    budget -= 1
        return orders

    def acknowledge(self, transfer_id: int, succeeded: bool) -> list[int]:
        """A transfer is over. Returns the requests that waited for it in vain and must look again.

        Raises:
            BlockOwnershipError: no such transfer is in flight.
        """
        if transfer_id not in self.in_flight:
            raise BlockOwnershipError(f"transfer {transfer_id} is not in flight; each transfer is acknowledged once")
        order, node = self.in_flight.pop(transfer_id)
        onboarding = order.target_tier is CacheTier.DEVICE
        self.counts = TransferCounts(
            self.counts.offloaded + (succeeded and not onboarding),
            self.counts.onboarded + (succeeded and onboarding),
            self.counts.failed + (not succeeded),
        )
        if onboarding:
            return self._finish_onboarding(order, node, succeeded)
        target = self._by_tier[order.target_tier]
        if succeeded and node.is_attached and self._is_parent_backed(node):
            target.put(node, order.target_slot)
            if target is not self.tiers[-1]:
                self._spill_candidates.append(node)
        target.end_transfer(order.target_slot)
        if order.source_tier is CacheTier.DEVICE:
            self.offloading.remove(node)
            if node.is_attached and node not in target:
                self._count_backed_child(node, -1)
            self._pool.unhold(node)
            if not succeeded:
                self._offload_candidates.pop(node, None)  # else a broken tier would be asked again in every step
        else:
            self._by_tier[order.source_tier].end_transfer(order.source_slot)
        self.offer(node)
        return []

    def _finish_onboarding(self, order: BlockTransfer, node: CachedBlock, succeeded: bool) -> list[int]:
        source = self._by_tier[order.source_tier]
        del self.loading[node]
        disappointed = []
        for request_id, awaited in list(self._awaited.items()):
            if order.transfer_id in awaited:
                awaited.remove(order.transfer_id)
                if not succeeded:
                    disappointed.append(request_id)
                if not (succeeded and awaited):
                    del self._awaited[request_id]
        if node.is_attached:
            if succeeded:
                self._on_moved(node, order.source_tier, CacheTier.DEVICE)
            else:
                self._remove(node)
        source.end_transfer(order.source_slot)
        self._pool.unhold(node)
        self.offer(node)
        return disappointed

    def _offload_prefix(self, tip: CachedBlock, budget: int) -> list[BlockTransfer]:
        """Orders for the blocks up to `tip` that have no lower copy, first ones first, at most `budget`."""
        missing = []
        node = tip
        while node.parent is not None and self.lower_tier(node) is None:
            missing.append(node)
            node = node.parent
        orders: list[BlockTransfer] = []
        for node in reversed(missing):
            if node.priority < self._min_priority:
                break
            if node in self.offloading:
                continue
            if len(orders) == budget:
                self._offload_candidates[tip] = None
                self._offload_candidates.move_to_end(tip, last=False)
                break
            self._count_backed_child(node, 1)  # before a slot is taken, so that it is not the one of its own parent
            slot = self._take_slot(self.tiers[0])
            if slot is None:
                self._count_backed_child(node, -1)
                if self._spill_candidates:  # what goes down a tier makes room
                    self._offload_candidates[tip] = None
                    self._offload_candidates.move_to_end(tip, last=False)
                break
            self.tiers[0].begin_transfer(slot)
            self._pool.hold(node)
            self.offloading.add(node)
            orders.append(self._order(node, CacheTier.DEVICE, node.block_id, self.tiers[0].tier, slot))
        return orders

    def _order(
        self, node: CachedBlock, source: CacheTier, source_slot: int, target: CacheTier, target_slot: int
    ) -> BlockTransfer:
        order = BlockTransfer(self._next_id, source, source_slot, target, target_slot, node.digest)
        self._next_id += 1
        self.in_flight[order.transfer_id] = order, node
        return order

    # Space below the device

    def _take_slot(self, tier: LowerTier) -> int | None:
        """A slot for a new copy, made free if need be; None when every copy in the tier is needed."""
        while not tier.free and len(tier.queue):
            node = tier.nodes[tier.queue.pop()]
            assert node is not None
            if self._may_drop(node, tier):
                self._drop_copy(node, tier)
        return tier.free.pop() if tier.free else None

    def _may_drop(self, node: CachedBlock, tier: LowerTier) -> bool:
        return not tier.num_transfers[tier.slots[node]] and (
            node not in self.num_backed_children or any(node in other for other in self.tiers if other is not tier)
        )

    def _drop_copy(self, node: CachedBlock, tier: LowerTier) -> None:
        before = self.nearest(node)
        is_last_lower = all(node not in other for other in self.tiers if other is not tier)
        self._pool.num_changes += 1
        if before is tier.tier and is_last_lower and node not in self.loading:
            self._remove(node)
            return
        tier.drop(node)
        if is_last_lower:
            self._count_backed_child(node, -1)
        after = self.nearest(node)
        if before is not None and after is not None and after is not before:
            self._on_moved(node, before, after)

    def offer(self, node: CachedBlock) -> None:
        """Queue the node's lower copies that may be dropped now, at the node's present rank."""
        for tier in self.tiers:
            if node in tier and self._may_drop(node, tier):
                tier.queue.push(tier.slots[node], node)

    def _count_backed_child(self, node: CachedBlock, change: int) -> None:
        """`node` is getting its first lower copy, or has lost its last."""
        parent = node.parent
        assert parent is not None
        count = self.num_backed_children.get(parent, 0) + change
        if count:
            self.num_backed_children[parent] = count
        else:
            del self.num_backed_children[parent]
            self.offer(parent)

    def _is_parent_backed(self, node: CachedBlock) -> bool:
        parent = node.parent
        assert parent is not None
        return parent.is_root or self.lower_tier(parent) is not None

    def _is_short(self, num_free: int, num_slots: int) -> bool:
        return num_free < self._free_fraction * num_slots
