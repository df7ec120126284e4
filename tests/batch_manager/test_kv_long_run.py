"""Many prompts through a small pool: memory stays bounded, hits are as many as a naive cache has."""

from __future__ import annotations

import gc
import random
import sys

import pytest

from batch_manager.kv import KvCacheManager, KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.request import Request
from tests.batch_manager.kv_helpers import manager
from tests.properties.naive_kv_cache import NaiveKvCache

SYSTEM_PROMPTS = [[1000 + n] * 40 for n in range(12)]


def prompt(rng: random.Random) -> list[int]:
    """One of a few beginnings, then tokens that nobody else has."""
    shared = SYSTEM_PROMPTS[min(rng.randrange(12), rng.randrange(12))]
    return shared[: rng.choice((8, 24, 40))] + [rng.randrange(10**9) for _ in range(rng.randrange(1, 40))]


def serve(kv: KvCacheManager, request_id: int, tokens: list[int], rng: random.Random) -> int:
    retention = None
    if rng.random() < 0.3:
        retention = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, rng.choice((20, 60)), 0.001)])
    salt = rng.randrange(50) if rng.random() < 0.1 else None
    request = Request(request_id, tokens, 1, retention=retention, cache_salt=salt)
    assert kv.allocate(request, len(tokens), kv.find_reuse(request)) is not None
    kv.begin_step(request_id)
    kv.store(request, len(tokens))
    kv.release(request)
    kv.end_step(request_id)
    for order in kv.take_transfers():
        kv.acknowledge_transfer(order.transfer_id, True)
    return request.num_reused_tokens


def grown_by(num_warm: int, num_measured: int, **options: int) -> int:
    """Memory blocks the interpreter holds more of after `num_measured` more prompts."""
    rng = random.Random(1)
    kv = manager(64, tokens_per_block=8, event_buffer_max_size=100, **options)
    held = 0
    for request_id in range(num_warm + num_measured):
        if request_id == num_warm:
            gc.collect()
            held = sys.getallocatedblocks()
        serve(kv, request_id, prompt(rng), rng)
    gc.collect()
    grown = sys.getallocatedblocks() - held
    kv.check_invariants()
    assert kv.num_free_blocks == 64
    assert kv.cache.tree.num_nodes <= 64 + options.get("host_blocks", 0)
    return grown


@pytest.mark.parametrize("options", [{}, {"host_blocks": 100}, {"attention_window": 20}])
def test_memory_does_not_grow_with_the_prompts_served(options: dict[str, int]) -> None:
    assert grown_by(1500, 1500, **options) < 750


@pytest.mark.long
def test_memory_does_not_grow_over_a_hundred_thousand_prompts() -> None:
    assert grown_by(5_000, 95_000) < 2_000


@pytest.mark.parametrize("strategy", ["lru", "lfu", "slru"])
def test_as_many_tokens_are_found_as_a_naive_cache_finds(strategy: str) -> None:
    rng = random.Random(2)
    kv = manager(48, tokens_per_block=8, enable_partial_reuse=False, eviction_strategy=strategy)
    naive = NaiveKvCache(48, 8, strategy)
    found = 0
    for request_id in range(300):
        tokens = prompt(rng)
        request = Request(request_id, tokens, 1)
        reuse = kv.find_reuse(request)
        assert kv.allocate(request, len(tokens), reuse) is not None
        kv.store(request, len(tokens))
        kv.release(request)
        found += reuse.num_tokens
        expected = naive.longest_match(None, tuple(tokens))
        assert reuse.num_tokens == expected
        path = naive.path((None, tuple(tokens[:expected])))
        if path:
            naive.hold(path[0], "request")
        for prefix in path:
            naive.entries[prefix].num_hits += 1
        naive.take("request", -(-len(tokens) // 8) - len(path))
        prefix = (None, tuple(tokens[:expected]))
        for end in range(expected + 8, len(tokens) + 1, 8):
            prefix = (None, tuple(tokens[:end]))
            naive.store(prefix, "request", 35)
        naive.give_back("request")
        if prefix[1]:
            naive.unhold(prefix, "request")
    assert found > 3000
