"""What happens to the cache, told to those outside: routers, peers, dashboards.

Kinds and fields follow TensorRT-LLM's KV cache events. The stream from its start, or from a snapshot, describes the
cache exactly: `KvCacheMirror` is the reader's half, and what the tests compare with the tree.

```
created(blocks per level)  stored(parent, [blocks])  updated(block, level, priority)  removed([blocks])
overflow(lost)             the buffer was full: events are missing here, read a snapshot
```
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from batch_manager.kv.keys import BlockKey


class CacheTier(IntEnum):
    """Where a block's bytes are; the numbers are the events' cache levels."""

    DEVICE = 0
    """The pool that the engine reads: GPU memory, or the main pool of a CPU engine."""
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class KvCacheCreatedData:
    num_blocks_per_cache_level: tuple[int, ...]
    """Device, host, disk."""


@dataclass(frozen=True, slots=True)
class KvCacheStoredBlockData:
    block_hash: bytes
    """[32] digest of the tokens, all before them, adapter and salt."""
    tokens: BlockKey
    adapter_id: int | None
    cache_level: CacheTier
    priority: int


@dataclass(frozen=True, slots=True)
class KvCacheStoredData:
    parent_hash: bytes
    """Digest of the block before the first one, or of the namespace when there is none."""
    blocks: tuple[KvCacheStoredBlockData, ...]
    """Each is the parent of the next."""
    begins_prompt: bool = False
    """Whether there is no block before the first one."""


@dataclass(frozen=True, slots=True)
class KvCacheRemovedData:
    block_hashes: tuple[bytes, ...]


class Change(NamedTuple):
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class KvCacheUpdatedData:
    block_hash: bytes
    cache_level: Change | None = None
    priority: Change | None = None


@dataclass(frozen=True, slots=True)
class KvCacheOverflowData:
    num_lost_events: int
    """Events dropped, oldest first, because nobody took them; the stream goes on after the gap."""


KvCacheEventData = (
    KvCacheCreatedData | KvCacheStoredData | KvCacheRemovedData | KvCacheUpdatedData | KvCacheOverflowData
)


@dataclass(frozen=True, slots=True)
class KvCacheEvent:
    event_id: int
    """Consecutive. An overflow has the id of the last event lost; all events of a snapshot have the id of the last
    event they include."""
    data: KvCacheEventData


class EventBuffer:
    """Events not yet taken, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[KvCacheEvent] = deque()
        self._capacity = capacity
        self._num_lost = 0
        self._last_event_id = -1
        self._removed: list[bytes] = []
        """Blocks removed in a row; they become one event."""

    def add(self, data: KvCacheEventData) -> None:
        self._flush_removed()
        self._append(data)

    def add_removed(self, block_hash: bytes) -> None:
        self._removed.append(block_hash)

    def take(self) -> list[KvCacheEvent]:
        """All events since the last call, oldest first; an overflow event stands where some were lost."""
        self._flush_removed()
        taken = list(self._events)
        self._events.clear()
        if self._num_lost:
            last_lost = self._last_event_id - len(taken)
            taken.insert(0, KvCacheEvent(last_lost, KvCacheOverflowData(self._num_lost)))
            self._num_lost = 0
        return taken

    def as_snapshot(self, contents: list[KvCacheEventData]) -> list[KvCacheEvent]:
        """`contents`, which describe the cache as it is now, as events that come instead of all so far."""
        self._flush_removed()
        return [KvCacheEvent(self._last_event_id, data) for data in contents]

    def _flush_removed(self) -> None:
        if self._removed:
            self._append(KvCacheRemovedData(tuple(self._removed)))
            self._removed.clear()

    def _append(self, data: KvCacheEventData) -> None:
        self._last_event_id += 1
        self._events.append(KvCacheEvent(self._last_event_id, data))
        if len(self._events) > self._capacity:
            self._events.popleft()
            self._num_lost += 1


class MirroredBlock(NamedTuple):
    parent_hash: bytes
    tokens: BlockKey
    adapter_id: int | None
    cache_level: int
    priority: int


class KvCacheMirror:
    """The cache as its events describe it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, MirroredBlock] = {}
        self.num_blocks_per_cache_level: tuple[int, ...] = ()
        self.is_complete = True
        """False after an overflow, until a snapshot is applied to a new mirror."""

    def apply(self, event: KvCacheEvent) -> None:
        """Raises `KeyError` when an event speaks of a block that the stream has not stored, unless some were lost."""
        match event.data:
            case KvCacheCreatedData(num_blocks):
                self.num_blocks_per_cache_level = num_blocks
            case KvCacheStoredData(parent_hash, blocks):
                for block in blocks:
                    self.blocks[block.block_hash] = MirroredBlock(
                        parent_hash, block.tokens, block.adapter_id, block.cache_level, block.priority
                    )
                    parent_hash = block.block_hash
            case KvCacheRemovedData(block_hashes):
                for block_hash in block_hashes:
                    if self.is_complete or block_hash in self.blocks:
                        del self.blocks[block_hash]
            case KvCacheUpdatedData(block_hash, cache_level, priority):
                if self.is_complete or block_hash in self.blocks:
                    known = self.blocks[block_hash]
                    self.blocks[block_hash] = known._replace(
                        cache_level=cache_level.new if cache_level else known.cache_level,
                        priority=priority.new if priority else known.priority,
                    )
            case KvCacheOverflowData():
                self.is_complete = False
