"""Block tables of requests: what they find, what they are given, what they leave behind.

```
table     [ found in the cache | copied in part | new ......... ]      one entry for `tokens_per_block` positions
tree       held by its deepest                   stored as they fill up, held then
           block found
```
"""

from __future__ import annotations

from collections.abc import Callable

from batch_manager.kv.block import NO_BLOCK, CachedBlock
from batch_manager.kv.cache import PrefixCache
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import BlockOwnershipError, KvCacheError, StaleReuseError
from batch_manager.kv.events import CacheTier
from batch_manager.kv.holding import NEVER, Grant, Holding
from batch_manager.kv.keys import BlockKey, namespace_of
from batch_manager.kv.leases import Lease, LeaseBook
from batch_manager.kv.matching import block_key
from batch_manager.kv.pins import PinBook
from batch_manager.kv.remote import RemoteLoads
from batch_manager.kv.retention import DEFAULT_RETENTION, checked_retention
from batch_manager.kv.reuse import PartialReuse, Reuse
from batch_manager.plan import BlockCopy
from batch_manager.request import Request

COPY_OWNER = "block copy"


class BlockTables:
    """Gives blocks to requests and takes them back."""

    def __init__(self, config: KvCacheConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.tokens_per_block = config.tokens_per_block
        self.num_blocks = config.num_blocks
        self.cache = PrefixCache(config, clock)
        self.pool = self.cache.pool
        self.leases = LeaseBook(self.pool)
        self.remote = RemoteLoads()
        self.pins = PinBook(self.leases, int(config.num_blocks * config.max_pinned_fraction), clock)
        self.holdings: dict[int, Holding] = {}
        """By request id."""
        self._copies: list[Lease] = []
        """Sources and targets of copies that the next step carries out: neither changes hands before it has."""
        self._copies_in_flight: dict[int, list[Lease]] = {}
        self._num_allocated = self._num_new = self._num_reused = self._num_missed = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now: free, or cached and held by nobody. Fenced ones do not count."""
        return self.pool.num_available

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that become free when the steps in flight end."""
        return self.pool.num_fenced

    def num_held_blocks(self, request: Request) -> int:
        """Blocks in the request's table, without those that fell out of the attention window."""
        holding = self.holdings.get(request.request_id)
        return len(request.block_ids) - (holding.num_retired if holding is not None else 0)

    @property
    def most_growing_blocks(self) -> int | None:
        """What a request holds at most while it generates, if its prompt is not more; `None`: no window, no limit."""
        return None if self.cache.window is None else self.cache.window.most_blocks

    @property
    def next_iteration(self) -> int:
        """The iteration being planned: what is taken now is taken for it."""
        return self.pool.fences.latest + 1

    # Finding

    def find_reuse(self, request: Request) -> Reuse:
        """What of the request's tokens is cached: at most all but the last. Changes nothing."""
        return self.cache.find(request)

    def is_current(self, reuse: Reuse) -> bool:
        """Whether what `reuse` names is still there; if not, call `find_reuse` again."""
        return self.cache.is_current(reuse)

    # Allocating

    def num_new_blocks(self, request: Request, num_tokens: int, reuse: Reuse | None = None) -> int:
        """How much `num_free_blocks` falls when `allocate` is called with the same arguments.

        Counts blocks found in the cache that nobody holds now: they can be evicted before, not after.
        """
        needed = -(-num_tokens // self.tokens_per_block) - len(request.block_ids)
        if reuse is None:
            return max(needed, 0)
        needed -= len(reuse.block_ids)
        if reuse.partial and not self._takes_over(reuse.partial, needed):
            needed += self.pool.is_evictable(reuse.partial.node)
        is_evictable = self.pool.is_evictable
        if self.cache.window is None:
            for node in reversed(reuse.path):
                if node.block_id != NO_BLOCK and not is_evictable(node):
                    break  # held, and so is all before it
                needed += 1
        else:
            needed += sum(is_evictable(node) for node in self.cache.in_window(reuse))
        return needed

    def _takes_over(self, partial: PartialReuse, num_new: int) -> bool:
        """Whether a partly matching block is overwritten behind the match rather than copied.

        When nobody needs it, and nothing is lost by it: the match is all it holds, or a copy would evict something else
        (`num_new` blocks are not to be had without), or copying is off.
        """
        return self.cache.can_take_over(partial.node) and (
            partial.num_tokens == len(partial.node.key)
            or num_new > len(self.pool.free)
            or not self.config.copy_on_partial_reuse
        )

    def allocate(self, request: Request, num_tokens: int, reuse: Reuse | None = None) -> list[BlockCopy] | None:
        """Grow the request's block table so that it covers `num_tokens` positions.

        Args:
            request: whose `block_ids` grow.
            num_tokens: positions 0 .. num_tokens - 1 have a block afterwards.
            reuse: at the first allocation only: blocks found are adopted, and `num_computed_tokens` and
                `num_reused_tokens` become `reuse.num_tokens`. With lower tiers the request may have to wait
                (`is_loading`) until they are brought back.

        Returns:
            Copies to carry out before the next step computes; or None when blocks are short: nothing has changed.

        Raises:
            StaleReuseError: what `reuse` names has been evicted or moved since; nothing has changed.
            BlockOwnershipError: `reuse` for a request that has blocks already; nothing has changed.
            KvCacheError: `num_tokens` is less than what was found; nothing has changed.
        """
        block_ids = request.block_ids
        if reuse is None:
            missing = -(-num_tokens // self.tokens_per_block) - len(block_ids)
            if missing <= 0:
                return []
            if missing > len(self.pool.free):
                self.refresh()
            if missing > self.pool.num_available:
                return None
            holding = self.holding_of(request) if block_ids else self._start_holding(request)
            self._grant(holding, missing, "allocate")
            return []
        if block_ids:
            raise BlockOwnershipError(
                f"request {request.request_id} has {len(block_ids)} blocks; cached blocks are adopted at its first "
                "allocation only, so release it first"
            )
        if num_tokens < reuse.num_tokens:
            raise KvCacheError(
                f"request {request.request_id}: {num_tokens} tokens asked for, {reuse.num_tokens} found in the cache; "
                "ask for at least as many"
            )
        if not self.is_current(reuse):
            raise StaleReuseError(
                f"blocks found for request {request.request_id} were evicted or moved since; call find_reuse again "
                "right before allocate"
            )
        if self.num_new_blocks(request, num_tokens, reuse) > len(self.pool.free):
            self.refresh()
        if self.num_new_blocks(request, num_tokens, reuse) > self.pool.num_available:
            return None
        return self._allocate_first(request, num_tokens, reuse)

    def _allocate_first(self, request: Request, num_tokens: int, reuse: Reuse) -> list[BlockCopy]:
        holding = self._start_holding(request)
        num_blocks = -(-num_tokens // self.tokens_per_block)
        num_found = len(reuse.path)
        if reuse.path:
            self._adopt_path(holding, reuse)
        copies: list[BlockCopy] = []
        if reuse.partial:
            source, num_copied, node = reuse.partial
            node.num_hits += 1
            if self._takes_over(reuse.partial, num_blocks - num_found):
                holding.grants.append(Grant(num_found, self.next_iteration, "allocate, over a partly matching block"))
                request.block_ids.append(self.cache.take_over(node))
                self._num_allocated += 1
            else:
                lease = self.leases.take(COPY_OWNER, self.next_iteration, "allocate", [node])
                self._grant(holding, 1, "allocate, copy of a partly matching block")
                target = request.block_ids[num_found]
                self.leases.keep(lease, target)
                self._copies.append(lease)
                copies.append(BlockCopy(source, target, num_copied))
        self._grant(holding, num_blocks - len(request.block_ids), "allocate")
        request.num_computed_tokens = request.num_reused_tokens = reuse.num_tokens
        self._num_reused += num_found
        self._num_missed += num_tokens // self.tokens_per_block - num_found
        if request.num_remote_tokens:
            self.remote.admit(request)
        return copies

    def _adopt_path(self, holding: Holding, reuse: Reuse) -> None:
        """The request holds the blocks found; those in lower tiers get device blocks, to be loaded."""
        request, path = holding.request, reuse.path
        first_lower = len(path)
        if self.cache.transfers is not None:
            while first_lower and path[first_lower - 1].block_id == NO_BLOCK:
                first_lower -= 1
        holding.grants.append(Grant(0, self.next_iteration, "allocate, found in the cache"))
        request.block_ids += reuse.block_ids[:first_lower]
        if self.cache.window is not None:
            holding.held.extend(self.cache.in_window(reuse))
            holding.num_retired = len(path) - len(holding.held)
            for node in holding.held:
                self.pool.hold(node)
        elif first_lower:
            self.pool.hold(path[first_lower - 1])
            holding.held.append(path[first_lower - 1])
        if self.cache.transfers is not None:
            self._grant(holding, len(path) - first_lower, "allocate, found in a lower tier")
            for node, block_id in zip(path[first_lower:], request.block_ids[first_lower:], strict=True):
                self.cache.transfers.onboard(node, block_id)
            if first_lower < len(path):
                self.pool.hold(path[-1])
                if holding.held:
                    self.pool.unhold(holding.held.pop())
                holding.held.append(path[-1])
            self.cache.transfers.wait_for(request.request_id, path)
        holding.tip = path[-1]
        holding.num_stored = len(path)
        holding.next_boundary += len(path) * self.tokens_per_block
        self._num_allocated += first_lower
        for index, node in enumerate(path):
            node.num_hits += 1
            retention = holding.block_retention(index, self.tokens_per_block)
            if retention is not None:
                self.cache.set_retention(node, retention)

    def _grant(self, holding: Holding, count: int, call: str) -> None:
        if count:
            block_ids = holding.request.block_ids
            holding.grants.append(Grant(len(block_ids), self.next_iteration, call))
            block_ids += self.pool.take(count)
            self._num_allocated += count
            self._num_new += count

    def holding_of(self, request: Request) -> Holding:
        holding = self.holdings.get(request.request_id)
        if holding is None or holding.request is not request:
            raise BlockOwnershipError(f"request {request.request_id} has no block table of this manager")
        return holding

    def _start_holding(self, request: Request) -> Holding:
        if request.request_id in self.holdings:
            raise BlockOwnershipError(
                f"request id {request.request_id} holds blocks already; ids are unique among live requests"
            )
        retention = checked_retention(request.request_id, request.retention)
        root = self.cache.tree.root(namespace_of(request))
        self.pool.hold(root)
        needs_store = self.config.enable_block_reuse or self.cache.window is not None
        holding = Holding(request, retention, root, self.tokens_per_block if needs_store else NEVER)
        self.holdings[request.request_id] = holding
        return holding

    # Storing and releasing

    def store(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks below `num_tokens` findable; give back those that fell out of the attention window.

        Where others have stored the same content meanwhile, the table names their block from now on.

        `num_tokens` counts committed tokens whose K and V are in the pool or written by a step already begun, never
        drafts that may be rejected. Nearly free unless a block filled up.

        Raises:
            KvCacheError: the request has fewer token ids than `num_tokens`, or its table covers fewer.
        """
        holding = self.holdings.get(request.request_id)
        if holding is not None and num_tokens >= holding.next_boundary:
            self._check_committed(request, num_tokens)
            num_full = num_tokens // self.tokens_per_block
            if self.config.enable_block_reuse:
                self._store_full_blocks(holding, num_full)
            if self.cache.window is not None:
                self._retire(holding, self.cache.window.first_block(num_tokens))
            holding.next_boundary = (num_full + 1) * self.tokens_per_block

    def _check_committed(self, request: Request, num_tokens: int) -> None:
        num_known = min(len(request.token_ids), len(request.block_ids) * self.tokens_per_block)
        if num_tokens > num_known:
            raise KvCacheError(
                f"request {request.request_id}: store up to {num_tokens} tokens, but only {num_known} have a known id "
                "and a block; pass committed tokens only"
            )

    def store_last_block(self, request: Request, num_tokens: int) -> None:
        """As `store`, and the last block as well if it is not full. For a request that is released right after.

        Whoever goes on where this request ends then finds its beginning to the token, as partial reuse.

        Raises:
            KvCacheError: as `store`.
        """
        self.store(request, num_tokens)
        holding = self.holding_of(request)
        start = holding.num_stored * self.tokens_per_block
        finds_parts = self.config.enable_block_reuse and self.config.enable_partial_reuse
        if not finds_parts or not start < num_tokens < holding.next_boundary:
            return
        self._check_committed(request, num_tokens)
        key = block_key(request, start, num_tokens)
        if len(key) == num_tokens - start and key not in holding.tip.children and holding.tip.is_attached:
            stored: list[CachedBlock] = []
            self._store_block(holding, key, stored)
            self._announce(holding, stored)
        holding.next_boundary = NEVER

    def _store_full_blocks(self, holding: Holding, num_full: int) -> None:
        size = self.tokens_per_block
        stored: list[CachedBlock] = []
        while holding.num_stored < num_full and holding.tip.is_attached:
            # A tip that was cleared, or lost in a failed load, cannot be found, nor could what is behind it.
            start = holding.num_stored * size
            if not self._store_block(holding, block_key(holding.request, start, start + size), stored):
                break
        self._announce(holding, stored)

    def _store_block(self, holding: Holding, key: BlockKey, stored: list[CachedBlock]) -> bool:
        """The next block of the table becomes the home of content `key`, or gives way to the block that is already.

        `stored` collects new homes. False: that block is being loaded, so neither is possible yet.
        """
        pool, index = self.pool, holding.num_stored
        node = holding.tip.children.get(key)
        if node is None:
            node = self.cache.tree.insert(holding.tip, key, pool.next_tick())
        if node.block_id == NO_BLOCK:
            old_tier = self.cache.nearest(node)
            pool.adopt(node, holding.request.block_ids[index])
            self.leases.follow_into_tree(node)
            if old_tier is None:
                node.retention = holding.block_retention(index, self.tokens_per_block) or DEFAULT_RETENTION
                stored.append(node)
            else:
                self.cache.on_moved(node, old_tier, CacheTier.DEVICE)
        elif self.cache.transfers is not None and node in self.cache.transfers.loading:
            return False
        else:
            # Others have computed the same: one block is enough for all, and who held both had more than it asked for.
            pool.hold(node)
            self.leases.give_back(holding.request.block_ids[index])
            holding.request.block_ids[index] = node.block_id
        if self.cache.window is None and holding.held:
            pool.unhold(holding.held.pop())
        holding.held.append(node)
        holding.tip = node
        holding.num_stored = index + 1
        return True

    def _announce(self, holding: Holding, stored: list[CachedBlock]) -> None:
        if stored and self.cache.events:
            self.cache.events.stored(holding.root, stored)

    def _retire(self, holding: Holding, first_needed: int) -> None:
        block_ids = holding.request.block_ids
        for index in range(holding.num_retired, first_needed):
            if self.pool.cached[block_ids[index]] is None:
                self.leases.give_back(block_ids[index])
            if index < holding.num_stored:
                self.pool.unhold(holding.held.popleft())
            block_ids[index] = NO_BLOCK
        holding.num_retired = max(holding.num_retired, first_needed)

    def release(self, request: Request) -> None:
        """Take all blocks back, last first; cached ones stay findable until evicted. Without blocks: nothing happens.

        `block_ids` becomes a new, empty list; `num_computed_tokens` is the caller's to set.
        """
        holding = self.holdings.get(request.request_id)
        if holding is not None and holding.request is request:
            del self.holdings[request.request_id]
            self._end_holding(holding)
        elif request.block_ids:
            raise BlockOwnershipError(f"request {request.request_id} has a block table that is not this manager's")

    def _end_holding(self, holding: Holding) -> None:
        request = holding.request
        for block_id in reversed(request.block_ids):
            if block_id != NO_BLOCK and self.pool.cached[block_id] is None:
                self.leases.give_back(block_id)
        for node in reversed(holding.held):
            self.pool.unhold(node)
        self.pool.unhold(holding.root)
        self.cache.tree.drop_root_if_unused(holding.root)
        if self.cache.transfers is not None:
            self.cache.transfers.stop_waiting(request.request_id)
        self.remote.end(request)
        request.block_ids = []

    # Steps

    def begin_step(self, iteration: int) -> None:
        """A step that may read or write any held block starts; what is released from now on waits for its end."""
        self.refresh()
        self.pool.fences.begin(iteration)
        if self._copies:
            self._copies_in_flight[iteration] = self._copies
            self._copies = []

    def end_step(self, iteration: int) -> None:
        """The step is done, or will never run."""
        self.pool.end_step(iteration)
        for lease in self._copies_in_flight.pop(iteration, ()):
            self.leases.end(lease.lease_id)

    def refresh(self) -> None:
        """End retention durations and pins whose time is over. Called by `begin_step`; call it when idle, too."""
        self.cache.end_retentions()
        self.pins.unpin_expired()
