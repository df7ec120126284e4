"""Blocks kept for somebody who is not a request: a transfer to another instance, a pinned prefix, a copy about to run.

```
request's table   [ cached | cached | private ]
lease              hold     (by the     counted here; when the request gives the block back while the count
                   on the    hold)      is above zero, it waits for the lease's end
                   deepest
```
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.errors import BlockOwnershipError
from batch_manager.kv.pool import BlockPool


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that stay as they are until the lease ends."""

    lease_id: int
    owner: str
    """Who holds it, for people."""
    iteration: int
    """In which it was taken."""
    call: str
    """By which call."""
    nodes: list[CachedBlock]
    """Held in the tree."""
    private_blocks: list[int] = field(default_factory=list)
    """Counted in `LeaseBook`; those that became cached since are held in the tree as well."""
    expires_at: float | None = None
    """When a pin ends by itself, on the manager's clock."""


class LeaseBook:
    """All leases, and the private blocks they keep."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._next_id = 1
        self.leases: dict[int, Lease] = {}
        self.counts: dict[int, int] = {}
        """Private block -> leases that keep it."""
        self.abandoned: set[int] = set()
        """Private blocks whose request is gone; only their leases keep them."""

    def take(
        self,
        owner: str,
        iteration: int,
        call: str,
        nodes: Iterable[CachedBlock],
        private_blocks: Iterable[int] = (),
        expires_at: float | None = None,
    ) -> Lease:
        lease = Lease(self._next_id, owner, iteration, call, list(nodes), expires_at=expires_at)
        self._next_id += 1
        for node in lease.nodes:
            self._pool.hold(node)
        for block_id in private_blocks:
            self.keep(lease, block_id)
        self.leases[lease.lease_id] = lease
        return lease

    def keep(self, lease: Lease, private_block: int) -> None:
        """The lease keeps this block of a request as well."""
        lease.private_blocks.append(private_block)
        self.counts[private_block] = self.counts.get(private_block, 0) + 1

    def end(self, lease_id: int) -> Lease:
        """Raises `BlockOwnershipError` when there is no such lease: a lease ends once."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            raise BlockOwnershipError(f"lease {lease_id} has ended already or never was; a lease ends once")
        for block_id in reversed(lease.private_blocks):
            node = self._pool.cached[block_id]
            if node is not None:
                self._pool.unhold(node)
                continue
            self.counts[block_id] -= 1
            if not self.counts[block_id]:
                del self.counts[block_id]
                if block_id in self.abandoned:
                    self.abandoned.remove(block_id)
                    self._pool.give_back(block_id)
        for node in reversed(lease.nodes):
            self._pool.unhold(node)
        return lease

    def give_back(self, block_id: int) -> None:
        """The request that owned private block `block_id` is done with it."""
        if block_id in self.counts:
            self.abandoned.add(block_id)
        else:
            self._pool.give_back(block_id)

    def follow_into_tree(self, node: CachedBlock) -> None:
        """A private block became `node`'s home: what kept it as private holds the node from now on."""
        for _ in range(self.counts.pop(node.block_id, 0)):
            self._pool.hold(node)
