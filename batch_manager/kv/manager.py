"""The KV block manager: who holds which block, what is found again, what is evicted.

Bookkeeping only; the blocks' bytes are the executor's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from batch_manager.kv.block import NO_BLOCK, BlockKey, CachedBlock
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import BlockOwnershipError, StaleReuseError
from batch_manager.kv.pool import BlockPool
from batch_manager.kv.radix_tree import RadixTree, namespace_of
from batch_manager.kv.retention import KvCacheRetentionConfig
from batch_manager.kv.reuse import NO_REUSE, PartialReuse, Reuse
from batch_manager.plan import BlockCopy
from batch_manager.request import Request

NEVER = 1 << 62
"""More tokens than any request has."""


class Holding:
    """What one request holds.

    `held` are nodes of the tree: with full attention only the deepest one (it holds all before it), with an attention
    window one for each stored block inside the window.
    """

    __slots__ = ("held", "next_boundary", "num_retired", "num_stored", "request", "root", "tip")

    def __init__(self, request: Request, root: CachedBlock) -> None:
        self.request = request
        self.root = root
        self.tip = root
        """Node of the last stored block."""
        self.held: deque[CachedBlock] = deque()
        self.num_stored = 0
        """Leading blocks of the table whose content is in the tree."""
        self.num_retired = 0
        """Leading blocks of the table that fell out of the attention window."""
        self.next_boundary = NEVER
        """`store` has nothing to do below so many tokens."""


class KvCacheManager:
    def __init__(self, config: KvCacheConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.tokens_per_block = config.tokens_per_block
        self.num_blocks = config.num_blocks
        self._clock = clock
        self._window = config.attention_window
        self._tree = RadixTree()
        self._pool = BlockPool(config.num_blocks, config.eviction_strategy, self._window is None, self._on_evicted)
        self._holdings: dict[int, Holding] = {}
        self._copy_sources: list[CachedBlock] = []
        self._copies_in_flight: dict[int, list[CachedBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now: free, or cached and held by nobody."""
        return self._pool.num_available

    # Reuse

    def find_reuse(self, request: Request) -> Reuse:
        """What of the request's tokens is cached. Changes nothing."""
        if not self.config.enable_block_reuse:
            return NO_REUSE
        tokens, size = request.token_ids, self.tokens_per_block
        limit = len(tokens) - 1
        namespace = namespace_of(request)
        root = self._tree.roots.get(namespace)
        path: list[CachedBlock] = []
        block_ids: list[int] = []
        start = 0
        if root is None:
            missing = tuple(tokens[:size])
            return Reuse(0, [], None, (namespace, missing) if len(missing) == size else None, [], 0)
        node = root
        while start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or child.block_id == NO_BLOCK:
                break
            path.append(child)
            block_ids.append(child.block_id)
            node = child
            start += size
        rest = tuple(tokens[start : start + size])
        first_missing_key = None
        if len(rest) == size and rest not in node.children:
            first_missing_key = (node if path else namespace, rest)
        partial = None
        if self.config.enable_partial_reuse and node.children:
            partial = self._find_partial(node, rest[: limit - start])
        num_tokens = start + (partial.num_tokens if partial else 0)
        return Reuse(num_tokens, block_ids, partial, first_missing_key, path, self._pool.num_vacated)

    def _find_partial(self, node: CachedBlock, tokens: BlockKey) -> PartialReuse | None:
        best = self._tree.best_partial_child(node, tokens)
        if best is None:
            return None
        source, num_tokens = best
        if not (self.config.copy_on_partial_reuse or self._can_take_over(source)):
            return None
        return PartialReuse(source.block_id, num_tokens, source)

    def _can_take_over(self, node: CachedBlock) -> bool:
        """Whether a partly matching block may be overwritten behind the match instead of being copied."""
        return self._pool.is_evictable(node) and not node.children

    def is_current(self, reuse: Reuse) -> bool:
        """Whether the blocks `reuse` names still hold what was found."""
        if reuse.num_vacated == self._pool.num_vacated:
            return True
        found = all(node.block_id == block_id for node, block_id in zip(reuse.path, reuse.block_ids, strict=True))
        return found and (reuse.partial is None or reuse.partial.node.block_id == reuse.partial.source)

    # Allocation

    def num_new_blocks(self, request: Request, num_tokens: int, reuse: Reuse | None = None) -> int:
        """How much `num_free_blocks` falls when `allocate` is called with the same arguments.

        Counts blocks found in the cache that nobody holds now: they can be evicted before, not after.
        """
        missing = -(-num_tokens // self.tokens_per_block) - len(request.block_ids)
        if reuse is None:
            return max(missing, 0)
        missing -= len(reuse.block_ids)
        for node in reversed(reuse.path):
            if not self._pool.is_evictable(node):
                break
            missing += 1
        if reuse.partial:
            source = reuse.partial.node
            if self._pool.is_evictable(source) and not self._can_take_over(source):
                missing += 1
        return missing

    def allocate(self, request: Request, num_tokens: int, reuse: Reuse | None = None) -> list[BlockCopy] | None:
        """Grow the request's block table so that it covers `num_tokens` positions.

        Args:
            request: whose `block_ids` grow.
            num_tokens: positions 0 .. num_tokens - 1 have a block afterwards.
            reuse: at the first allocation only: blocks found are adopted, and `num_computed_tokens` and
                `num_reused_tokens` become `reuse.num_tokens`.

        Returns:
            Copies to carry out before the next step computes; or None when blocks are short: nothing has changed.

        Raises:
            StaleReuseError: blocks of `reuse` were evicted since; nothing has changed.
            BlockOwnershipError: `reuse` for a request that has blocks already; nothing has changed.
        """
        block_ids = request.block_ids
        if reuse is None:
            missing = -(-num_tokens // self.tokens_per_block) - len(block_ids)
            if missing <= 0:
                return []
            if missing > self._pool.num_available:
                return None
            if not block_ids:
                self._hold_for(request)
            block_ids += self._pool.take(missing)
            return []
        if block_ids:
            raise BlockOwnershipError(
                f"request {request.request_id} has {len(block_ids)} blocks; cached blocks are adopted at its first "
                "allocation only, so release it first"
            )
        if not self.is_current(reuse):
            raise StaleReuseError(
                f"blocks found for request {request.request_id} were evicted since; call find_reuse again right "
                "before allocate"
            )
        if self.num_new_blocks(request, num_tokens, reuse) > self._pool.num_available:
            return None
        return self._allocate_first(request, num_tokens, reuse)

    def _allocate_first(self, request: Request, num_tokens: int, reuse: Reuse) -> list[BlockCopy]:
        holding = self._hold_for(request)
        num_blocks = -(-num_tokens // self.tokens_per_block)
        block_ids = request.block_ids
        block_ids += reuse.block_ids
        if reuse.path:
            holding.tip = reuse.path[-1]
            holding.held.append(holding.tip)
            holding.num_stored = len(reuse.path)
            holding.next_boundary += len(reuse.path) * self.tokens_per_block
            self._pool.hold(holding.tip)
            for node in reuse.path:
                node.num_hits += 1
        copies: list[BlockCopy] = []
        if reuse.partial is None:
            block_ids += self._pool.take(num_blocks - len(block_ids))
        elif self._can_take_over(reuse.partial.node):
            block_ids.append(self._pool.surrender(reuse.partial.node))
            self._tree.detach(reuse.partial.node)
            block_ids += self._pool.take(num_blocks - len(block_ids))
        else:
            source, num_copied, node = reuse.partial
            self._pool.hold(node)
            self._copy_sources.append(node)
            node.num_hits += 1
            block_ids += self._pool.take(num_blocks - len(block_ids))
            copies.append(BlockCopy(source, block_ids[len(reuse.block_ids)], num_copied))
        request.num_computed_tokens = request.num_reused_tokens = reuse.num_tokens
        return copies

    def _hold_for(self, request: Request) -> Holding:
        if request.request_id in self._holdings:
            raise BlockOwnershipError(
                f"request id {request.request_id} holds blocks already; ids are unique among live requests"
            )
        root = self._tree.root(namespace_of(request))
        self._pool.hold(root)
        holding = self._holdings[request.request_id] = Holding(request, root)
        if self.config.enable_block_reuse:
            holding.next_boundary = self.tokens_per_block
        return holding

    # Storing and releasing

    def store(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks below `num_tokens` findable.

        `num_tokens` counts committed tokens whose K and V are in the pool or written by a step already begun, never
        drafts that may be rejected. Nearly free unless a block filled up.
        """
        holding = self._holdings.get(request.request_id)
        if holding is not None and num_tokens >= holding.next_boundary:
            self._store_full_blocks(holding, num_tokens)

    def _store_full_blocks(self, holding: Holding, num_tokens: int) -> None:
        request, size, pool = holding.request, self.tokens_per_block, self._pool
        tokens = request.token_ids
        retention = request.retention
        assert retention is None or isinstance(retention, KvCacheRetentionConfig)
        node = holding.tip
        num_full = num_tokens // size
        for index in range(holding.num_stored, num_full):
            if not node.is_attached:
                holding.next_boundary = NEVER
                return
            start = index * size
            key = tuple(tokens[start : start + size])
            child = node.children.get(key)
            if child is None:
                child = self._tree.insert(node, key, pool.next_tick())
                pool.adopt(child, request.block_ids[index])
                if retention is not None:
                    child.priority, child.duration = retention.for_block(start, start + size, request.num_prompt_tokens)
            else:
                pool.hold(child)
            if holding.held:
                pool.unhold(holding.held.pop())
            holding.held.append(child)
            holding.tip = node = child
            holding.num_stored = index + 1
        holding.next_boundary = (num_full + 1) * size

    def release(self, request: Request) -> None:
        """Take all blocks back, last first; cached ones stay findable until evicted. No blocks: nothing happens."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for block_id in reversed(request.block_ids):
            if self._pool.cached[block_id] is None:
                self._pool.give_back(block_id)
        for node in reversed(holding.held):
            self._pool.unhold(node)
        self._pool.unhold(holding.root)
        self._tree.drop_root_if_empty(namespace_of(request))
        request.block_ids = []

    def _on_evicted(self, node: CachedBlock) -> None:
        self._tree.detach(node)

    # Steps

    def begin_step(self, iteration: int) -> None:
        """A step that may read or write any held block starts; blocks released from now on wait for its end."""
        self._pool.fences.begin(iteration)
        if self._copy_sources:
            self._copies_in_flight[iteration] = self._copy_sources
            self._copy_sources = []

    def end_step(self, iteration: int) -> None:
        """The step is done, or will never run."""
        self._pool.end_step(iteration)
        for source in self._copies_in_flight.pop(iteration, ()):
            self._pool.unhold(source)

    def check_invariants(self) -> None:
        """Recount everything; raises `KvInvariantError`. O(blocks)."""

    def ledger(self) -> list[str]:
        return []
