"""The cache's content: what is found, what is evicted, what moves between tiers, and who is told.

The manager above decides for whom blocks are held; here a block is only held or not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from batch_manager.kv.block import NO_BLOCK, CachedBlock
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import KvCacheError
from batch_manager.kv.events import CacheTier
from batch_manager.kv.expiry import ExpiryQueue
from batch_manager.kv.keys import BlockKey, multimodal_tags, namespace_of
from batch_manager.kv.matching import AttentionWindow, match_prefix, match_window
from batch_manager.kv.pool import BlockPool
from batch_manager.kv.publisher import EventPublisher
from batch_manager.kv.radix_tree import RadixTree
from batch_manager.kv.retention import DEFAULT_RETENTION, BlockRetention
from batch_manager.kv.reuse import NO_REUSE, PartialReuse, Reuse
from batch_manager.kv.tiers import LowerTier
from batch_manager.kv.transfers import TierTransfers
from batch_manager.request import Request


class PrefixCache:
    """The reuse tree over the device pool and the tiers below it."""

    def __init__(self, config: KvCacheConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.tokens_per_block = config.tokens_per_block
        self.window = (
            None
            if config.attention_window is None
            else AttentionWindow(config.attention_window, config.tokens_per_block)
        )
        self.tree = RadixTree()
        self._expiries = ExpiryQueue(clock)
        has_tiers = bool(config.host_blocks or config.disk_blocks)
        self.pool = BlockPool(
            config.num_blocks,
            config.eviction_strategy,
            self.window is None,
            self._expiries,
            self._on_evicted,
            self._on_reusable if has_tiers else None,
        )
        self.transfers = self._make_transfers() if has_tiers else None
        self.events = (
            EventPublisher(config.event_buffer_max_size, (config.num_blocks, config.host_blocks, config.disk_blocks))
            if config.event_buffer_max_size
            else None
        )

    def _make_transfers(self) -> TierTransfers:
        config = self.config
        sizes = {CacheTier.HOST: config.host_blocks, CacheTier.DISK: config.disk_blocks}
        return TierTransfers(
            self.pool,
            [LowerTier(tier, size, config.eviction_strategy) for tier, size in sizes.items() if size],
            config.secondary_offload_min_priority,
            config.offload_free_fraction,
            config.max_offloads_per_step,
            self.remove,
            self.on_moved,
        )

    # Finding

    def find(self, request: Request) -> Reuse:
        """What of the request's tokens is cached. Changes nothing."""
        if not self.config.enable_block_reuse:
            return NO_REUSE
        size = self.tokens_per_block
        limit = len(request.token_ids) - 1
        namespace = namespace_of(request)
        root = self.tree.roots.get(namespace)
        path: list[CachedBlock] = []
        block_ids: list[int] = []
        if root is not None and self.window is None:
            path = match_prefix(root, request, size, limit)
            block_ids = [node.block_id for node in path]
        elif root is not None and self.window is not None:
            path = match_window(root, request, size, limit, self.window)
            retired = self.window.first_block(len(path) * size)
            block_ids = [NO_BLOCK] * retired + [node.block_id for node in path[retired:]]
        start = len(path) * size
        node = path[-1] if path else root
        tokens: BlockKey = tuple(request.token_ids[start : start + size])
        tags = multimodal_tags(request.multimodal_spans, start, start + size)
        first_missing_key = None
        if len(tokens) == size:
            child = node.children.get(tokens + tags) if node else None
            if child is None or (self.window is not None and child.block_id == NO_BLOCK):
                first_missing_key = (path[-1] if path else namespace, tokens + tags)
        partial = None
        if node is not None and not tags and self.config.enable_partial_reuse:
            partial = self._find_partial(node, tokens[: limit - start])
        num_tokens = start + (partial.num_tokens if partial else 0)
        return Reuse(num_tokens, block_ids, partial, first_missing_key, path, self.pool.num_changes)

    def _find_partial(self, node: CachedBlock, tokens: BlockKey) -> PartialReuse | None:
        best = self.tree.best_partial_child(node, tokens)
        if best is None:
            return None
        source, num_tokens = best
        if source.block_id == NO_BLOCK or (self.transfers and source in self.transfers.loading):
            return None
        if not (self.config.copy_on_partial_reuse or self.can_take_over(source)):
            return None
        return PartialReuse(source.block_id, num_tokens, source)

    def can_take_over(self, node: CachedBlock) -> bool:
        """Whether a partly matching block may be overwritten behind the match instead of being copied."""
        return self.pool.is_evictable(node) and not node.children

    def in_window(self, reuse: Reuse) -> list[CachedBlock]:
        """The blocks of `reuse.path` that the request will read."""
        if self.window is None:
            return reuse.path
        return reuse.path[self.window.first_block(len(reuse.path) * self.tokens_per_block) :]

    def is_current(self, reuse: Reuse) -> bool:
        """Whether what `reuse` names is still there; if not, call `find_reuse` again."""
        partial = reuse.partial
        if reuse.num_changes != self.pool.num_changes:
            for node, block_id in zip(reuse.path, reuse.block_ids, strict=True):
                is_retired = self.window is not None and block_id == NO_BLOCK
                if not node.is_attached or (node.block_id != block_id and not is_retired):
                    return False
            if partial and (not partial.node.is_attached or partial.node.block_id != partial.source):
                return False
        return partial is None or self.config.copy_on_partial_reuse or self.can_take_over(partial.node)

    def find_resident(self, request: Request) -> list[CachedBlock]:
        """The blocks of all the request's tokens, up to the first that is not on the device."""
        root = self.tree.roots.get(namespace_of(request))
        if root is None:
            return []
        path = match_prefix(root, request, self.tokens_per_block, len(request.token_ids))
        return list(takewhile(lambda node: self.nearest(node) is CacheTier.DEVICE, path))

    def holders(self, path: list[CachedBlock]) -> list[CachedBlock]:
        """Which blocks of `path` to hold so that all are: the deepest, which keeps those before it, or each."""
        return path[-1:] if self.window is None else path

    # Changing

    def nearest(self, node: CachedBlock) -> CacheTier | None:
        """The nearest tier from which the content can be read now; None: known only as the way to what is behind."""
        if self.transfers is not None:
            return self.transfers.nearest(node)
        return None if node.block_id == NO_BLOCK else CacheTier.DEVICE

    def set_retention(self, node: CachedBlock, retention: BlockRetention) -> None:
        old_priority = node.priority
        node.retention = retention
        self.pool.rank_again(node)
        if self.transfers is not None:
            self.transfers.offer(node)
        if self.events is not None and node.priority != old_priority and self.nearest(node) is not None:
            self.events.reprioritized(node, old_priority, node.priority)

    def end_retentions(self) -> None:
        """Blocks whose retention duration is over fall back to the default priority."""
        for node in self._expiries.due():
            self.set_retention(node, DEFAULT_RETENTION)

    def remove(self, node: CachedBlock) -> None:
        """Take `node` and all behind it out of the tree; device blocks still held follow when they are not."""
        self._announce_removed([node, *self.tree.behind(node)])
        self._forget(self.tree.detach(node))

    def take_over(self, node: CachedBlock) -> int:
        """A block that `can_take_over` allows leaves its content; returns the block, now the caller's."""
        block_id = self.pool.surrender(node)
        self._on_evicted(node)
        return block_id

    def clear(self) -> None:
        """Nothing of what is cached now will be found again."""
        self._announce_removed(list(self.tree))
        self._forget(self.tree.detach_all())

    def publisher(self) -> EventPublisher:
        """Raises `KvCacheError` when no events are kept."""
        if self.events is None:
            raise KvCacheError("no events are kept: event_buffer_max_size is 0; set it to how many to keep")
        return self.events

    def on_moved(self, node: CachedBlock, old: CacheTier, new: CacheTier) -> None:
        """The nearest tier that has `node` is another one now."""
        if self.events is not None:
            self.events.moved(node, old, new)

    def _announce_removed(self, nodes: list[CachedBlock]) -> None:
        if self.events is not None:
            for node in reversed(nodes):
                if self.nearest(node) is not None:
                    self.events.removed(node)

    def _forget(self, detached: list[CachedBlock]) -> None:
        self.pool.num_changes += 1
        if self.transfers is not None:
            for node in reversed(detached):
                self.transfers.forget(node)
        self.pool.forget(detached)

    def _on_reusable(self, node: CachedBlock) -> None:
        assert self.transfers is not None
        self.transfers.on_reusable(node)

    def _on_evicted(self, node: CachedBlock) -> None:
        """`node` has lost its device block."""
        left_in = self.transfers.on_evicted(node) if self.transfers is not None else None
        if left_in is not None:
            self.on_moved(node, CacheTier.DEVICE, left_in)
            return
        if self.events is not None:
            self.events.removed(node)
        # Outside an attention window a block without content may still be the way to others; nobody needs it as a leaf.
        while not node.children and node.block_id == NO_BLOCK and (parent := node.parent) is not None:
            self.tree.detach(node)
            node = parent
