"""An account of every block: who holds it, since which iteration, by which call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from batch_manager.kv.block import NO_BLOCK, NOT_FENCED, CachedBlock
from batch_manager.kv.events import CacheTier

if TYPE_CHECKING:
    from batch_manager.kv.holding import Holding
    from batch_manager.kv.manager import KvCacheManager


class OwnerKind(StrEnum):
    REQUEST = "request"
    QUARANTINE = "quarantine"
    """A request that ended without giving its blocks back."""
    LEASE = "lease"
    """A pin, a copy within the pool, a transfer to another instance."""
    TRANSFER = "transfer"
    """A copy to or from a lower tier."""
    STEP = "step"
    """Released while the step was in flight."""
    TREE = "tree"
    """Cached, held by nobody."""


class LedgerEntry(NamedTuple):
    block_id: int
    kind: OwnerKind
    owner: str
    """For people, such as `request 7`."""
    owner_id: int | None
    """Of the request, lease, transfer or step; the tree has none."""
    iteration: int | None
    """In which the owner took the block."""
    call: str | None
    """By which call."""


class BlockCounts(NamedTuple):
    """Every block is exactly one of these."""

    free: int
    used: int
    """Held by a live request."""
    cached: int
    """Findable, held by nobody, evictable."""
    leased: int
    """Held by a lease, transfer, fence or quarantine only, or lost."""


class Leak(NamedTuple):
    owner: str
    block_ids: list[int]
    iteration: int | None
    call: str | None


class Ledger(NamedTuple):
    entries: list[LedgerEntry]
    """By block id; a shared block has several."""
    counts: BlockCounts
    lost_blocks: set[int]
    """Neither free nor held by anybody."""

    @staticmethod
    def of(manager: KvCacheManager) -> Ledger:
        entries = sorted(_entries(manager), key=lambda entry: entry.block_id)
        kinds: dict[int, set[OwnerKind]] = {}
        for entry in entries:
            kinds.setdefault(entry.block_id, set()).add(entry.kind)
        free = set(manager.pool.free)
        used = sum(OwnerKind.REQUEST in owners for owners in kinds.values())
        cached = sum(owners == {OwnerKind.TREE} for owners in kinds.values())
        lost = set(range(manager.num_blocks)) - free - set(kinds)
        leased = len(kinds) - used - cached + len(lost)
        return Ledger(entries, BlockCounts(len(free), used, cached, leased), lost)

    def leaks_of(self, holding: Holding) -> list[Leak]:
        """What the ended request `holding` is about still holds, by the call that took it."""
        owner = f"request {holding.request.request_id}"
        leaks: dict[tuple[int | None, str | None], Leak] = {}
        for entry in self.entries:
            if entry.kind is OwnerKind.REQUEST and entry.owner == owner:
                leak = leaks.setdefault((entry.iteration, entry.call), Leak(owner, [], entry.iteration, entry.call))
                leak.block_ids.append(entry.block_id)
        return list(leaks.values())


def _entries(manager: KvCacheManager) -> Iterator[LedgerEntry]:
    for kind, holdings in (
        (OwnerKind.REQUEST, manager.holdings.values()),
        (OwnerKind.QUARANTINE, manager.quarantine),
    ):
        for holding in holdings:
            yield from _entries_of_holding(kind, holding)
    for lease in manager.leases.leases.values():
        owner = f"lease {lease.lease_id} ({lease.owner})"
        blocks = {node.block_id for node in _kept_by(manager, lease.nodes)}.union(lease.private_blocks)
        for block_id in blocks:
            yield LedgerEntry(block_id, OwnerKind.LEASE, owner, lease.lease_id, lease.iteration, lease.call)
    if manager.cache.transfers is not None:
        for order, node in manager.cache.transfers.in_flight.values():
            if CacheTier.DEVICE in (order.source_tier, order.target_tier):
                owner = f"transfer {order.transfer_id}"
                for kept in _kept_by(manager, [node]):
                    yield LedgerEntry(
                        kept.block_id, OwnerKind.TRANSFER, owner, order.transfer_id, None, "take_transfers"
                    )
    for iteration, released in manager.pool.fences.behind.items():
        for block_id in released.private_blocks:
            yield LedgerEntry(block_id, OwnerKind.STEP, f"step {iteration}", iteration, iteration, "release")
    for block_id, cached in enumerate(manager.pool.cached):
        if cached is None:
            continue
        if cached.fence != NOT_FENCED:
            yield LedgerEntry(block_id, OwnerKind.STEP, f"step {cached.fence}", cached.fence, cached.fence, "release")
        elif not cached.num_holds:
            yield LedgerEntry(block_id, OwnerKind.TREE, "tree", None, None, None)


def _entries_of_holding(kind: OwnerKind, holding: Holding) -> Iterator[LedgerEntry]:
    owner = f"request {holding.request.request_id}"
    block_ids = holding.request.block_ids
    ends = [grant.first_index for grant in holding.grants[1:]] + [len(block_ids)]
    for grant, end in zip(holding.grants, ends, strict=True):
        for block_id in block_ids[grant.first_index : end]:
            if block_id != NO_BLOCK:
                yield LedgerEntry(block_id, kind, owner, holding.request.request_id, grant.iteration, grant.call)


def _kept_by(manager: KvCacheManager, held: Iterable[CachedBlock]) -> Iterator[CachedBlock]:
    """The blocks that holds on `held` keep: themselves and, with full attention, those before them."""
    kept = {node: None for tip in held for node in (tip.path() if manager.cache.window is None else [tip])}
    return iter(kept)
