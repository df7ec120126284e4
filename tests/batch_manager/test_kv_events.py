"""The event stream: what it says, that it is bounded, that it is enough."""

from __future__ import annotations

import pytest

from batch_manager.kv import CacheTier, KvCacheError, KvCacheManager, KvCacheMirror, KvCacheRetentionConfig
from batch_manager.kv.events import (
    Change,
    KvCacheCreatedData,
    KvCacheOverflowData,
    KvCacheRemovedData,
    KvCacheStoredData,
    KvCacheUpdatedData,
)
from batch_manager.kv.keys import MultimodalTag, Namespace, block_digest, namespace_digest
from tests.batch_manager.kv_helpers import Requests, manager


def data(kv: KvCacheManager) -> list[object]:
    return [event.data for event in kv.take_events()]


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_blocks_are_stored_then_removed_leaf_first(num_blocks: int) -> None:
    """vLLM's `test_kv_cache_events`: one stored event for a prompt, one removed event for what it displaces."""
    kv = manager(num_blocks, tokens_per_block=4, event_buffer_max_size=100)
    requests = Requests(kv)
    prompt = list(range(4 * num_blocks))
    requests.serve(prompt)
    created, stored = data(kv)
    assert created == KvCacheCreatedData((num_blocks, 0, 0))
    assert isinstance(stored, KvCacheStoredData)
    assert stored.parent_hash == namespace_digest(Namespace())
    assert [block.tokens for block in stored.blocks] == [
        tuple(prompt[start : start + 4]) for start in range(0, len(prompt), 4)
    ]
    assert {block.cache_level for block in stored.blocks} == {CacheTier.DEVICE}
    requests.compute([99] * 4 * num_blocks)
    removed, stored_again = data(kv)
    assert removed == KvCacheRemovedData(tuple(block.block_hash for block in reversed(stored.blocks)))
    assert isinstance(stored_again, KvCacheStoredData)


def test_moves_between_tiers_and_changes_of_priority_are_updates() -> None:
    kv = manager(2, tokens_per_block=4, host_blocks=2, offload_free_fraction=1.0, event_buffer_max_size=100)
    requests = Requests(kv)
    requests.serve([1] * 4)
    for order in kv.take_transfers():
        kv.acknowledge_transfer(order.transfer_id, True)
    stored = data(kv)[1]
    assert isinstance(stored, KvCacheStoredData)
    block_hash = stored.blocks[0].block_hash
    requests.serve([2] * 7)
    assert KvCacheUpdatedData(block_hash, cache_level=Change(0, 1)) in data(kv)
    important = KvCacheRetentionConfig([KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 90)])
    requests.admit([1] * 5, retention=important)
    for order in kv.take_transfers():
        kv.acknowledge_transfer(order.transfer_id, True)
    events = data(kv)
    assert KvCacheUpdatedData(block_hash, priority=Change(35, 90)) in events
    assert KvCacheUpdatedData(block_hash, cache_level=Change(1, 0)) in events


def test_an_overflowing_buffer_says_how_much_is_lost_and_a_snapshot_makes_up_for_it() -> None:
    kv = manager(3, tokens_per_block=4, event_buffer_max_size=4)
    requests = Requests(kv)
    for token in range(20):
        requests.serve([token] * 4)
    events = kv.take_events()
    assert len(events) == 5
    assert isinstance(events[0].data, KvCacheOverflowData)
    assert events[0].data.num_lost_events == events[0].event_id + 1
    assert [event.event_id for event in events] == list(range(events[0].event_id, events[0].event_id + 5))
    lossy = KvCacheMirror()
    for event in events:
        lossy.apply(event)
    assert not lossy.is_complete
    mirror = KvCacheMirror()
    snapshot = kv.snapshot_events()
    for event in snapshot:
        mirror.apply(event)
    assert snapshot[-1].event_id == events[-1].event_id
    assert {block.tokens for block in mirror.blocks.values()} == {(token,) * 4 for token in (17, 18, 19)}
    requests.serve([50] * 4)
    for event in kv.take_events():
        mirror.apply(event)
    assert {block.tokens for block in mirror.blocks.values()} == {(token,) * 4 for token in (18, 19, 50)}


def test_events_nobody_asked_for_are_refused_by_name() -> None:
    kv = manager(4)
    for call in (kv.take_events, kv.snapshot_events):
        with pytest.raises(KvCacheError, match="event_buffer_max_size is 0"):
            call()


def test_digests_tell_apart_prefixes_adapters_salts_and_items() -> None:
    """SGLang's `hash_value_repeating_tokens` and `isolated_by_extra_key`, vLLM's collision of adapter and salt."""
    roots = [namespace_digest(Namespace(*pair)) for pair in ((None, None), (1, None), (None, 1), (1, 1), (11, None))]
    first = [block_digest(root, (1, 2, 3, 4)) for root in roots]
    second = [block_digest(parent, (1, 2, 3, 4)) for parent in first]
    tagged = [
        block_digest(roots[0], (1, 2, 3, 4, MultimodalTag(offset, item)))
        for offset in (0, 1)
        for item in (b"cat", b"dog")
    ]
    digests = roots + first + second + tagged
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}
    assert block_digest(roots[0], (1, 2, 3, 4)) == first[0]
