"""From changes of blocks to events."""

from __future__ import annotations

from collections.abc import Callable

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.events import (
    CacheTier,
    Change,
    EventBuffer,
    KvCacheCreatedData,
    KvCacheEvent,
    KvCacheEventData,
    KvCacheStoredBlockData,
    KvCacheStoredData,
    KvCacheUpdatedData,
)
from batch_manager.kv.radix_tree import RadixTree, RootBlock


class EventPublisher:
    """Writes the event stream. Made only when somebody wants one: digests and records cost time."""

    def __init__(self, capacity: int, num_blocks_per_cache_level: tuple[int, ...]) -> None:
        self._buffer = EventBuffer(capacity)
        self._created = KvCacheCreatedData(num_blocks_per_cache_level)
        self._buffer.add(self._created)

    def take(self) -> list[KvCacheEvent]:
        return self._buffer.take()

    def stored(self, root: RootBlock, nodes: list[CachedBlock]) -> None:
        """New blocks on the device, along one path; one event for each run without a gap."""
        run: list[CachedBlock] = []
        for node in nodes:
            if run and node.parent is not run[-1]:
                self._buffer.add(self._stored(root, run, CacheTier.DEVICE))
                run = []
            run.append(node)
        self._buffer.add(self._stored(root, run, CacheTier.DEVICE))

    def removed(self, node: CachedBlock) -> None:
        self._buffer.add_removed(node.digest)

    def moved(self, node: CachedBlock, old: CacheTier, new: CacheTier) -> None:
        self._buffer.add(KvCacheUpdatedData(node.digest, cache_level=Change(old, new)))

    def reprioritized(self, node: CachedBlock, old: int, new: int) -> None:
        self._buffer.add(KvCacheUpdatedData(node.digest, priority=Change(old, new)))

    def snapshot(self, tree: RadixTree, nearest: Callable[[CachedBlock], CacheTier | None]) -> list[KvCacheEvent]:
        """The cache as it is, for a reader that missed events; goes on with the events after these."""
        contents: list[KvCacheEventData] = [self._created]
        for root in tree.roots.values():
            for node in tree.behind(root):
                tier = nearest(node)
                if tier is not None:
                    contents.append(self._stored(root, [node], tier))
        return self._buffer.as_snapshot(contents)

    @staticmethod
    def _stored(root: RootBlock, run: list[CachedBlock], tier: CacheTier) -> KvCacheStoredData:
        parent = run[0].parent
        assert parent is not None
        blocks = tuple(
            KvCacheStoredBlockData(node.digest, node.key, root.namespace.adapter_id, tier, node.priority)
            for node in run
        )
        return KvCacheStoredData(parent.digest, blocks, isinstance(parent, RootBlock))
