"""Counting everything again, from the owners' side, and comparing with what the counters say."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from batch_manager.kv.block import NO_BLOCK, NOT_FENCED, CachedBlock
from batch_manager.kv.errors import KvInvariantError
from batch_manager.kv.events import CacheTier

if TYPE_CHECKING:
    from batch_manager.kv.manager import KvCacheManager


def check_invariants(manager: KvCacheManager) -> None:
    """O(blocks). Raises `KvInvariantError` naming the first thing that does not add up."""
    _check_states(manager)
    _check_tables(manager)
    _check_holds(manager)
    _check_tree(manager)
    _check_tiers(manager)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise KvInvariantError(what)


def _check_states(manager: KvCacheManager) -> None:
    pool = manager.pool
    _require(len(set(pool.free)) == len(pool.free), f"a block is free twice: {sorted(pool.free)}")
    counts = manager.ledger().counts
    _require(sum(counts) == pool.num_blocks, f"{counts} do not add up to {pool.num_blocks} blocks")
    owned = {entry.block_id for entry in manager.ledger().entries}
    both = owned.intersection(pool.free)
    _require(not both, f"blocks {sorted(both)} are free and owned")
    evictable = [node for node in pool.cached if node is not None and pool.is_evictable(node)]
    _require(len(evictable) == pool.num_evictable, f"{len(evictable)} evictable, counted {pool.num_evictable}")
    _require(counts.cached == pool.num_evictable, f"{counts}, but {pool.num_evictable} evictable")
    for node in evictable:
        may_go = manager.cache.window is not None or not node.num_resident_children
        _require(
            (node.block_id in pool.queue) == may_go,
            f"block {node.block_id} is evictable with {node.num_resident_children} blocks behind it on the device; "
            f"queued for eviction: {node.block_id in pool.queue}",
        )
    queued = sum(block_id in pool.queue for block_id in range(pool.num_blocks))
    _require(queued == len(pool.queue), f"{queued} blocks queued for eviction, counted {len(pool.queue)}")
    fenced = sum(node is not None and node.fence != NOT_FENCED for node in pool.cached)
    fenced += sum(len(released.private_blocks) for released in pool.fences.behind.values())
    _require(fenced == pool.num_fenced, f"{fenced} blocks fenced, counted {pool.num_fenced}")
    _require(bool(pool.fences.in_flight) or not fenced, f"{fenced} blocks fenced, but no step is in flight")


def _check_tables(manager: KvCacheManager) -> None:
    owners: dict[int, int] = {}
    for holding in manager.holdings.values():
        request = holding.request
        table = [block_id for block_id in request.block_ids if block_id != NO_BLOCK]
        _require(len(set(table)) == len(table), f"request {request.request_id}: a block twice in {table}")
        kept = [node.block_id for node in holding.tip.path()]
        _require(
            request.block_ids[holding.num_retired : holding.num_stored] == kept[holding.num_retired :],
            f"request {request.request_id}: its place in the tree is {kept}, its table {request.block_ids}",
        )
        for block_id in table:
            _require(0 <= block_id < manager.num_blocks, f"request {request.request_id}: no block {block_id}")
            if manager.pool.cached[block_id] is None:
                _require(
                    block_id not in owners,
                    f"private block {block_id} is in the tables of requests {owners.get(block_id)} and "
                    f"{request.request_id}",
                )
                owners[block_id] = request.request_id


def _check_holds(manager: KvCacheManager) -> None:
    expected: Counter[CachedBlock] = Counter()
    for holding in (*manager.holdings.values(), *manager.quarantine):
        expected.update(holding.held)
        expected[holding.root] += 1
    for lease in manager.leases.leases.values():
        expected.update(lease.nodes)
        expected.update(
            node for block_id in lease.private_blocks if (node := manager.pool.cached[block_id]) is not None
        )
    if manager.cache.transfers is not None:
        for order, node in manager.cache.transfers.in_flight.values():
            expected[node] += CacheTier.DEVICE in (order.source_tier, order.target_tier)
    resident = [node for node in manager.pool.cached if node is not None]
    children: Counter[CachedBlock] = Counter()
    for node in resident:
        assert node.parent is not None
        children[node.parent] += 1
        if manager.cache.window is None and node.num_holds:
            expected[node.parent] += 1
    for node in resident:
        _require(
            node.num_holds == expected[node],
            f"block {node.block_id} has {node.num_holds} holds, its holders make {expected[node]}",
        )
        _require(
            node.num_resident_children == children[node],
            f"block {node.block_id} counts {node.num_resident_children} blocks behind it, there are {children[node]}",
        )
        _require(
            node.is_attached or bool(node.num_holds) or node.fence != NOT_FENCED,
            f"block {node.block_id} cannot be found and is held by nobody, yet is not free",
        )
        if manager.cache.window is None:
            _require(
                node.parent is not None and (node.parent.is_root or node.parent.block_id != NO_BLOCK),
                f"block {node.block_id} is on the device, the block before it is not",
            )
    for root in manager.cache.tree.roots.values():
        _require(root.num_holds == expected[root] + 1, f"root {root.namespace} has {root.num_holds} holds")


def _check_tree(manager: KvCacheManager) -> None:
    tree, pool = manager.cache.tree, manager.pool
    nodes = list(tree)
    _require(len(nodes) == tree.num_nodes, f"{len(nodes)} nodes in the tree, counted {tree.num_nodes}")
    for node in (*tree.roots.values(), *nodes):
        _require(node.is_attached, f"{node} is in the tree but marked detached")
        for key, child in node.children.items():
            _require(child.parent is node and child.key == key, f"{child} is not where its key says")
        if node.ordered_keys is not None:
            _require(node.ordered_keys == sorted(node.children), f"ordered keys of {node} differ from its children")
    for node in nodes:
        if node.block_id != NO_BLOCK:
            _require(pool.cached[node.block_id] is node, f"{node} is not the content of its block")
        if not node.children:
            _require(manager.cache.nearest(node) is not None, f"{node} has no content and leads nowhere")


def _check_tiers(manager: KvCacheManager) -> None:
    transfers = manager.cache.transfers
    if transfers is None:
        return
    for tier in transfers.tiers:
        used = [slot for slot, node in enumerate(tier.nodes) if node is not None]
        busy = [slot for slot, count in enumerate(tier.num_transfers) if count and tier.nodes[slot] is None]
        _require(len(set(tier.free)) == len(tier.free), f"{tier.tier.name}: a slot is free twice")
        _require(
            sorted(tier.free + used + busy) == list(range(tier.num_slots)),
            f"{tier.tier.name}: free {tier.free}, used {used}, busy {busy} are not all {tier.num_slots} slots once",
        )
        for node, slot in tier.slots.items():
            _require(tier.nodes[slot] is node, f"{tier.tier.name}: slot {slot} and its block disagree")
            _require(node.is_attached, f"{tier.tier.name}: slot {slot} holds a block that cannot be found")
            parent = node.parent
            assert parent is not None
            _require(
                parent.is_root or transfers.lower_tier(parent) is not None,
                f"{tier.tier.name}: slot {slot} holds a block whose predecessor is in no lower tier",
            )
    expected = Counter(
        node.parent
        for node in manager.cache.tree
        if node in transfers.offloading or transfers.lower_tier(node) is not None
    )
    _require(expected == transfers.num_backed_children, "children with lower copies are not what is counted")
