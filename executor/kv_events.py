"""From the block manager's events to the public ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

from batch_manager import KvCacheManager
from batch_manager.kv import KvCacheEvent, events
from batch_manager.kv.keys import BlockKey, MultimodalTag
from executor.api import kv_cache as public


class KvEventSource:
    """Takes events out of the block manager, which is used under a lock only."""

    def __init__(
        self, kv: KvCacheManager, changed: threading.Condition, is_stopped: Callable[[], bool], window_size: int
    ) -> None:
        """Bind.

        Args:
            kv: made with an event buffer.
            changed: the block manager's lock; notified after each iteration.
            is_stopped: whether no more events will come.
            window_size: tokens that attention reaches back.
        """
        self._kv = kv
        self._changed = changed
        self._is_stopped = is_stopped
        self._window_size = window_size

    def take(self, timeout: float | None) -> list[public.KVCacheEvent]:
        """All events since the last call, waiting up to `timeout` seconds (`None`: without end) for the first."""
        taken: list[KvCacheEvent] = []

        def has_come() -> bool:
            taken.extend(self._kv.take_events())
            return bool(taken) or self._is_stopped()

        with self._changed:
            self._changed.wait_for(has_come, timeout)
        return [public.KVCacheEvent(event.event_id, _data(event.data), self._window_size) for event in taken]


def _data(
    data: events.KvCacheEventData,
) -> (
    public.KVCacheCreatedData
    | public.KVCacheStoredData
    | public.KVCacheRemovedData
    | public.KVCacheUpdatedData
    | public.KVCacheOverflowData
):
    match data:
        case events.KvCacheCreatedData(num_blocks):
            return public.KVCacheCreatedData(list(num_blocks))
        case events.KvCacheStoredData():
            parent = None if data.begins_prompt else _hash(data.parent_hash)
            return public.KVCacheStoredData(parent, [_stored_block(block) for block in data.blocks])
        case events.KvCacheRemovedData(block_hashes):
            return public.KVCacheRemovedData([_hash(digest) for digest in block_hashes])
        case events.KvCacheUpdatedData(digest, cache_level, priority):
            return public.KVCacheUpdatedData(_hash(digest), _change(cache_level), _change(priority))
        case events.KvCacheOverflowData(num_lost):
            return public.KVCacheOverflowData(num_lost)


def _stored_block(block: events.KvCacheStoredBlockData) -> public.KVCacheStoredBlockData:
    key: BlockKey = block.tokens
    return public.KVCacheStoredBlockData(
        _hash(block.block_hash),
        [public.UniqueToken(part) for part in key if isinstance(part, int)],
        block.adapter_id,
        int(block.cache_level),
        block.priority,
        [(part.content_hash, part.offset) for part in key if isinstance(part, MultimodalTag)],
    )


def _change(change: events.Change | None) -> public.KVCacheEventDiffInt | None:
    return None if change is None else public.KVCacheEventDiffInt(int(change.old), int(change.new))


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
