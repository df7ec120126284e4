"""KV cache events: what the cache holds, told to those outside."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from itertools import pairwise

import executor as trtllm
from executor import Executor, KvCacheConfig, kv_cache
from tests.executor.driving import OpenExecutor, request, run_one


def manager_of(executor: Executor) -> kv_cache.KVCacheEventManager:
    manager = executor.get_kv_cache_event_manager()
    assert manager is not None
    return manager


def test_events_begin_with_the_size_of_the_cache_and_go_on_with_stored_blocks(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(max_tokens=64, event_buffer_max_size=1000))
    manager = manager_of(executor)
    (created,) = manager.get_latest_events()
    assert isinstance(created, trtllm.kv_cache.KVCacheEvent)
    assert created.event_id == 0
    assert created.data == kv_cache.KVCacheCreatedData([16, 0, 0])
    assert created.window_size == 256

    run_one(executor, request(list(range(10, 19)), 4))
    events = manager.get_latest_events(timedelta(seconds=10))
    assert [each.event_id for each in events] == list(range(1, 1 + len(events)))
    stored = [each.data for each in events]
    assert all(isinstance(each, kv_cache.KVCacheStoredData) for each in stored)
    blocks = [block for each in stored for block in each.blocks]
    assert [token.token_id for token in blocks[0].tokens] == [10, 11, 12, 13]
    assert [token.token_id for token in blocks[1].tokens] == [14, 15, 16, 17]
    assert stored[0].parent_hash is None
    for before, after in pairwise(stored):
        assert after.parent_hash == before.blocks[-1].block_hash
    for block in blocks:
        assert 0 <= block.block_hash < 2**64
        assert (block.lora_id, block.cache_level, block.priority, block.mm_keys) == (None, 0, 35, [])


def test_removed_blocks_are_told_by_the_hashes_they_were_stored_under(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(max_tokens=32, event_buffer_max_size=1000))
    known: set[int] = set()
    num_removed = 0
    for first in range(10, 100, 10):
        run_one(executor, request(list(range(first, first + 20)), 4))
    for event in manager_of(executor).get_latest_events():
        match event.data:
            case kv_cache.KVCacheStoredData(_, blocks):
                known |= {block.block_hash for block in blocks}
            case kv_cache.KVCacheRemovedData(hashes):
                assert known.issuperset(hashes)
                known -= set(hashes)
                num_removed += len(hashes)
    assert num_removed > 0
    assert len(known) <= 8


def test_a_full_buffer_says_how_many_events_are_missing(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(event_buffer_max_size=2))
    for first in (10, 40, 70):
        run_one(executor, request(list(range(first, first + 20)), 8))
    first, *kept = manager_of(executor).get_latest_events()
    assert isinstance(first.data, kv_cache.KVCacheOverflowData)
    assert first.data.num_lost_events > 0
    assert len(kept) == 2
    assert kept[0].event_id == first.event_id + 1


def test_waiting_for_events_ends_with_the_time_an_event_or_the_executor(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(event_buffer_max_size=100))
    manager = manager_of(executor)
    assert len(manager.get_latest_events()) == 1
    for timeout in (timedelta(milliseconds=50), 50):
        started = time.monotonic()
        assert manager.get_latest_events(timeout) == []
        assert time.monotonic() - started >= 0.05

    heard: list[list[kv_cache.KVCacheEvent]] = []

    def listen() -> None:
        while events := manager.get_latest_events():
            heard.append(events)

    listener = threading.Thread(target=listen)
    listener.start()
    run_one(executor, request(list(range(10, 30)), 4))
    executor.shutdown()
    listener.join(30)
    assert not listener.is_alive()
    assert sum(map(len, heard)) > 0


def test_without_a_buffer_there_is_no_event_manager(open_executor: OpenExecutor) -> None:
    assert open_executor().get_kv_cache_event_manager() is None
