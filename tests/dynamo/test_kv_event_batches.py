"""What routers are told of a cache: after any run it is what the cache holds of full, unsalted blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager import KvCacheConfig, KvCacheManager, Request
from batch_manager.kv import events
from executor.api.kv_cache import KVCacheEvent, KVCacheOverflowData
from executor.dynamo.kv_event_batches import KvEventBatches
from executor.kv_events import _data

SIZE = 4


class RouterMirror:
    """A router's index: the tokens that are cached, as chains of full blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, batch: list[dict[str, Any]]) -> None:
        for event in batch:
            if event["type"] == "removed":
                for block_hash in event["block_hashes"]:
                    del self.blocks[block_hash]
                continue
            parent = event["parent_hash"]
            assert parent is None or parent in self.blocks
            assert event["num_block_tokens"] == [SIZE] * len(event["block_hashes"])
            for index, block_hash in enumerate(event["block_hashes"]):
                assert -(2**63) <= block_hash < 2**63
                tokens = tuple(event["token_ids"][index * SIZE : (index + 1) * SIZE])
                self.blocks[block_hash] = parent, tokens
                parent = block_hash

    def prefixes(self) -> set[tuple[int, ...]]:
        def prefix(block_hash: int) -> tuple[int, ...]:
            parent, tokens = self.blocks[block_hash]
            return tokens if parent is None else prefix(parent) + tokens

        return set(map(prefix, self.blocks))


def drive(kv: KvCacheManager, prompts: list[tuple[list[int], int | None]]) -> None:
    """Each prompt is computed and given back."""
    for number, (prompt, salt) in enumerate(prompts, start=kv.next_iteration):
        request = Request(number, prompt, 1, cache_salt=salt)
        assert kv.allocate(request, len(prompt), kv.find_reuse(request)) is not None
        kv.begin_step(number)
        kv.store_last_block(request, len(prompt))
        kv.release(request)
        kv.end_step(number)


def public(kv: KvCacheManager) -> list[KVCacheEvent]:
    return [KVCacheEvent(event.event_id, _data(event.data), 100) for event in kv.take_events()]


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=24),
        st.sampled_from([None, None, None, 7]),
    ),
    max_size=25,
)


@given(PROMPTS)
@settings(max_examples=60, deadline=None)
def test_routers_know_the_full_blocks_that_everybody_finds(prompts: list[tuple[list[int], int | None]]) -> None:
    kv = KvCacheManager(KvCacheConfig(num_blocks=12, tokens_per_block=SIZE, event_buffer_max_size=10_000))
    batches, router, mirror = KvEventBatches(SIZE), RouterMirror(), events.KvCacheMirror()
    for start in range(0, len(prompts), 5):
        drive(kv, prompts[start : start + 5])
        taken = kv.take_events()
        for event in taken:
            mirror.apply(event)
        router.apply(batches.take([KVCacheEvent(event.event_id, _data(event.data), 100) for event in taken]))
    unsalted = Request(-1, [0], 1)
    for prefix in router.prefixes():
        unsalted.token_ids = [*prefix, 9]
        assert kv.find_reuse(unsalted).num_tokens >= len(prefix), "what routers are told is there"
    for prompt, salt in prompts:
        if salt is None:
            unsalted.token_ids = [*prompt, 9]
            found = len(kv.find_reuse(unsalted).block_ids) * SIZE
            assert all(tuple(prompt[:end]) in router.prefixes() for end in range(SIZE, found + 1, SIZE))


def test_after_lost_events_routers_know_nothing_and_learn_anew() -> None:
    kv = KvCacheManager(KvCacheConfig(num_blocks=12, tokens_per_block=SIZE, event_buffer_max_size=10_000))
    batches, router = KvEventBatches(SIZE), RouterMirror()
    drive(kv, [([1] * 8, None)])
    router.apply(batches.take(public(kv)))
    assert len(router.blocks) == 2
    router.apply(batches.take([KVCacheEvent(99, KVCacheOverflowData(5), 100)]))
    assert not router.blocks
    drive(kv, [([2] * 8, None)])
    router.apply(batches.take(public(kv)))
    assert router.prefixes() == {(2,) * 4, (2,) * 8}
