"""The KV block manager: who holds which block, what is found again, what goes when space is short.

Bookkeeping only: the blocks' bytes are the executor's, which carries out the copies and transfers ordered here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from batch_manager.kv.audit import check_invariants
from batch_manager.kv.block import NO_BLOCK
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import BlockOwnershipError
from batch_manager.kv.events import CacheTier, KvCacheEvent
from batch_manager.kv.holding import Holding
from batch_manager.kv.ledger import Leak, Ledger
from batch_manager.kv.pins import Pin
from batch_manager.kv.stats import NO_TIER, KvCacheStats, TierStats
from batch_manager.kv.tables import BlockTables
from batch_manager.kv.transfers import NO_TRANSFERS, BlockTransfer
from batch_manager.request import Request


class KvCacheManager(BlockTables):
    """Block tables, the reuse tree, eviction, tiers, pins, and an account of every block of one pool.

    Not thread-safe: one thread, the scheduler's, makes all calls. A block table grows at its end only, except that
    entries outside the attention window become `NO_BLOCK`, and that `store` exchanges a block for the one another
    request has filled with the same content before.

    Args:
        config: sizes and policies.
        clock: seconds; only differences count. For retention durations and pins.
    """

    def __init__(self, config: KvCacheConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, clock)
        self.quarantine: list[Holding] = []
        """Of requests that ended without giving their blocks back."""
        self.lost_blocks: set[int] = set()
        """Blocks nobody holds that are not free either."""
        self._num_quarantined_blocks = 0

    # Tiers

    def is_loading(self, request: Request) -> bool:
        """Whether blocks found in a lower tier, or sent by another instance, are still on their way; the request cannot
        run before."""
        if self.remote.is_waiting(request):
            return True
        return self.cache.transfers is not None and self.cache.transfers.is_loading(request.request_id)

    @property
    def num_blocks_in_transfer(self) -> int:
        """Blocks held by copies between tiers only; they can be had once those are acknowledged. O(such blocks)."""
        return 0 if self.cache.transfers is None else self.cache.transfers.num_blocks_held()

    def take_transfers(self) -> list[BlockTransfer]:
        """Copies between tiers to carry out, each to be acknowledged. Call after `begin_step`, for the loads, and after
        a step's blocks were released, before others get them.

        They need not wait for the step, nor the step for them: no step reads or writes what they write. Those to one
        tier are acknowledged in the order of this list.
        """
        return [] if self.cache.transfers is None else self.cache.transfers.take_orders()

    def acknowledge_transfer(self, transfer_id: int, succeeded: bool) -> list[Request]:
        """A transfer is over. One that failed, or whose bytes were damaged, makes its block a miss.

        Returns:
            Requests that waited for it in vain: they hold nothing any more, have nothing computed, and must be
            admitted again.

        Raises:
            BlockOwnershipError: no such transfer is in flight.
        """
        if self.cache.transfers is None:
            raise BlockOwnershipError(f"transfer {transfer_id} is not in flight; there are no lower tiers")
        disappointed = []
        for request_id in self.cache.transfers.acknowledge(transfer_id, succeeded):
            request = self.holdings[request_id].request
            self.release(request)
            request.num_computed_tokens = request.num_reused_tokens = 0
            disappointed.append(request)
        return disappointed

    # Other instances

    def expect_remote_load(self, request: Request, num_tokens: int) -> None:
        """When the request is admitted, another instance sends the blocks of its first `num_tokens` tokens; 0: no more.

        Raises:
            BlockOwnershipError: the request waits for such blocks now.
        """
        if self.remote.is_waiting(request):
            raise BlockOwnershipError(f"request {request.request_id} waits for blocks of another instance already")
        request.num_remote_tokens = num_tokens

    def take_remote_loads(self) -> list[Request]:
        """Requests with `num_remote_tokens` that have been admitted since the last call.

        Those of which a block is missing (`is_loading`) wait for `acknowledge_remote_load`; `lease` their blocks while
        they are written.
        """
        return self.remote.take_admitted()

    def acknowledge_remote_load(self, request: Request) -> None:
        """The K and V of the first `num_remote_tokens` tokens are in the request's blocks: it goes on from there.

        Raises:
            BlockOwnershipError: the request does not wait for another instance (any more).
        """
        if not self.remote.is_waiting(request):
            raise BlockOwnershipError(f"request {request.request_id} does not wait for blocks of another instance")
        request.receipt.num_transferred_tokens += request.num_remote_tokens - request.num_computed_tokens
        request.num_computed_tokens = request.num_reused_tokens = request.num_remote_tokens
        self.remote.end(request)

    # Leases and pins

    def lease(self, request: Request, owner: str) -> int:
        """Keep all blocks of the request as they are until `end_lease`, whatever becomes of the request.

        For those who read or write them beside the steps, such as a transfer to another instance. `owner` names them in
        the ledger. Returns the lease's id.
        """
        holding = self.holding_of(request)
        private = [b for b in request.block_ids if b != NO_BLOCK and self.pool.cached[b] is None]
        return self.leases.take(owner, self.next_iteration, "lease", holding.held, private).lease_id

    def lease_prefix(self, request: Request, owner: str) -> tuple[int, list[int]] | None:
        """Keep what is in the device pool of the request's tokens, whole blocks, until `end_lease`.

        Only tokens, adapter, salt and multimodal items of `request` matter; it need not run.

        Returns:
            The lease's id, and the blocks in the order of their tokens; None: not a single one is there.
        """
        path = self.cache.find_resident(request)
        if not path:
            return None
        lease = self.leases.take(owner, self.next_iteration, "lease_prefix", self.cache.holders(path))
        return lease.lease_id, [node.block_id for node in path]

    def end_lease(self, lease_id: int) -> None:
        """Raises `BlockOwnershipError` when the lease has ended already or never was."""
        self.leases.end(lease_id)

    def pin(self, request: Request, seconds: float | None = None) -> Pin:
        """Keep what is cached of the request's tokens in the device pool, until `unpin` or for so many seconds.

        Only tokens, adapter, salt and multimodal items of `request` matter; it need not run.

        Raises:
            PinError: no full block of it is in the device pool.
            PinQuotaError: the quota (`max_pinned_fraction`) is used up.
        """
        return self.pins.pin(self.cache.find_resident(request), self.cache, self.next_iteration, seconds)

    def unpin(self, pin_id: int) -> None:
        """Raises `BlockOwnershipError` when there is no such pin."""
        self.pins.unpin(pin_id)

    # Watching

    def take_events(self) -> list[KvCacheEvent]:
        """Events since the last call. Raises `KvCacheError` when `event_buffer_max_size` is 0."""
        return self.cache.publisher().take()

    def snapshot_events(self) -> list[KvCacheEvent]:
        """Events that build the cache as it is now from nothing; `take_events` goes on from there."""
        return self.cache.publisher().snapshot(self.cache.tree, self.cache.nearest)

    def clear(self) -> None:
        """Forget everything cached. What requests hold stays theirs, but nobody will find it."""
        self.cache.clear()

    def stats(self) -> KvCacheStats:
        return KvCacheStats(
            self.num_blocks,
            self.num_free_blocks,
            self.num_blocks - self.num_free_blocks,
            self.tokens_per_block,
            self._num_allocated,
            self._num_new,
            self._num_reused,
            self._num_missed,
            self.pool.num_evictions,
            self._tier_stats(CacheTier.HOST),
            self._tier_stats(CacheTier.DISK),
            *(NO_TRANSFERS if self.cache.transfers is None else self.cache.transfers.counts),
            self.pins.num_pinned_blocks,
            self._num_quarantined_blocks,
        )

    def _tier_stats(self, wanted: CacheTier) -> TierStats:
        for tier in self.cache.transfers.tiers if self.cache.transfers is not None else ():
            if tier.tier is wanted:
                return TierStats(tier.num_slots, tier.num_slots - len(tier.free))
        return NO_TIER

    def ledger(self) -> Ledger:
        """Who holds what: an entry for each block and owner. O(blocks)."""
        return Ledger.of(self)

    @property
    def may_have_leaks(self) -> bool:
        """Whether `find_leaks` can find any when no request is live. O(blocks in transfer)."""
        returning = self.num_fenced_blocks + self.num_blocks_in_transfer
        return bool(self.holdings) or self.num_free_blocks + returning < self.num_blocks

    def find_leaks(self, live_request_ids: Iterable[int]) -> list[Leak]:
        """Blocks held for requests that are not live, or for nobody, and blocks lost altogether.

        They are quarantined: never handed out until `free_quarantined`, since nobody knows who still writes to them.
        A leak is reported once.
        """
        live = set(live_request_ids)
        ledger = self.ledger()
        leaks = [
            leak
            for request_id, holding in self.holdings.items()
            if request_id not in live
            for leak in ledger.leaks_of(holding)
        ]
        for request_id in [request_id for request_id in self.holdings if request_id not in live]:
            self.quarantine.append(self.holdings.pop(request_id))
        lost = ledger.lost_blocks - self.lost_blocks
        if lost:
            leaks.append(Leak("nobody", sorted(lost), None, None))
            self.lost_blocks |= lost
        self._num_quarantined_blocks += sum(len(leak.block_ids) for leak in leaks)
        return leaks

    def free_quarantined(self) -> int:
        """Take quarantined blocks back; the caller knows that nothing touches them. Returns how many owners had any."""
        count = len(self.quarantine) + bool(self.lost_blocks)
        for holding in self.quarantine:
            self._end_holding(holding)
        for block_id in self.lost_blocks:
            self.pool.give_back(block_id)
        self.quarantine.clear()
        self.lost_blocks.clear()
        self._num_quarantined_blocks = 0
        return count

    def check_invariants(self) -> None:
        """Recount everything. O(blocks). Raises `KvInvariantError` that says what does not add up."""
        check_invariants(self)
