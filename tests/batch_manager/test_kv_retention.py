"""Which blocks go first: priorities, durations, strategies, pins."""

from __future__ import annotations

from datetime import timedelta

import pytest

from batch_manager.kv import (
    BlockOwnershipError,
    EvictionStrategy,
    InvalidKvCacheConfigError,
    KvCacheConfig,
    KvCacheManager,
    KvCacheRetentionConfig,
    PinError,
    PinQuotaError,
    TokenRangeRetentionConfig,
)
from tests.batch_manager.kv_helpers import Requests, blocks_of, manager


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed_manager(num_blocks: int, **options: float) -> tuple[KvCacheManager, Clock]:
    clock = Clock()
    config = KvCacheConfig(num_blocks=num_blocks, tokens_per_block=4, enable_partial_reuse=False, **options)
    return KvCacheManager(config, clock), clock


def whole(priority: int, duration: timedelta | float | None = None) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, priority, duration)], priority, duration)


def priorities(requests: Requests, tokens: list[int]) -> list[int]:
    return [node.priority for node in requests.kv.cache.find_resident(requests.new(tokens))]


def cached(requests: Requests, *prompts: list[int]) -> list[bool]:
    return [requests.num_found([*prompt, -1]) == len(prompt) for prompt in prompts]


def test_a_range_of_17_tokens_covers_two_blocks_of_16_and_the_first_range_wins() -> None:
    requests = Requests(manager(10))
    prompt = blocks_of(1, 2, 3, 4)
    ranges = [TokenRangeRetentionConfig(0, 17, 90), TokenRangeRetentionConfig(17, 40, 10)]
    request = requests.compute(prompt[:50], retention=KvCacheRetentionConfig(ranges, decode_retention_priority=5))
    requests.generate(request, [7] * 40)
    assert priorities(requests, request.token_ids) == [90, 90, 10, 35, 5]


def test_a_request_that_finds_blocks_gives_them_its_own_retention_and_one_without_leaves_it() -> None:
    requests = Requests(manager(10, tokens_per_block=4))
    requests.serve([1] * 8, retention=whole(80))
    requests.serve([1] * 9)
    assert priorities(requests, [1] * 8) == [80, 80]
    requests.serve([1] * 9, retention=whole(10))
    assert priorities(requests, [1] * 8) == [10, 10]


def test_lower_priorities_are_evicted_first_whatever_their_age() -> None:
    requests = Requests(manager(4, tokens_per_block=4))
    requests.serve([1] * 4, retention=whole(80))
    requests.serve([2] * 4)
    requests.serve([3] * 4, retention=whole(0))
    requests.serve([4] * 4, retention=whole(100))
    for survivors in ([True, True, False, True], [True, False, False, True], [False, False, False, True]):
        requests.admit([9] * 4)
        assert cached(requests, [1] * 4, [2] * 4, [3] * 4, [4] * 4) == survivors


def test_a_block_with_blocks_behind_it_outlives_them_at_any_priority() -> None:
    requests = Requests(manager(3, tokens_per_block=4))
    ranges = [TokenRangeRetentionConfig(0, 4, 0), TokenRangeRetentionConfig(4, None, 90)]
    requests.serve([1] * 12, retention=KvCacheRetentionConfig(ranges))
    for num_found in (8, 4, 0):
        requests.admit([9] * 4)
        assert requests.num_found([1] * 12) == num_found


def test_a_priority_ends_when_its_duration_has_passed_since_the_block_became_reusable() -> None:
    kv, clock = timed_manager(2)
    requests = Requests(kv)
    request = requests.compute([1] * 4, retention=whole(80, 1000))
    clock.now += 50
    kv.release(request)
    requests.serve([2] * 4, retention=whole(60))
    clock.now += 0.9
    kv.refresh()
    assert priorities(requests, [1] * 4) == [80]
    clock.now += 0.2
    requests.admit([9] * 4)
    assert cached(requests, [1] * 4, [2] * 4) == [False, True]


def test_the_clock_of_a_duration_starts_anew_when_the_block_was_in_use_again() -> None:
    kv, clock = timed_manager(4)
    requests = Requests(kv)
    requests.serve([1] * 4, retention=whole(80, timedelta(seconds=1)))
    clock.now += 0.9
    requests.serve([1] * 5)
    clock.now += 0.9
    kv.refresh()
    assert priorities(requests, [1] * 4) == [80]
    clock.now += 0.1
    kv.refresh()
    assert priorities(requests, [1] * 4) == [35]


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        (EvictionStrategy.LRU, 2),
        (EvictionStrategy.MRU, 3),
        (EvictionStrategy.FIFO, 1),
        (EvictionStrategy.LFU, 5),
        (EvictionStrategy.SLRU, 5),
    ],
)
def test_each_strategy_has_its_own_victim(strategy: EvictionStrategy, victim: int) -> None:
    """Used last in the order 2 4 1 5 3; found again: 1 and 2 twice, 3 and 4 once, 5 never."""
    requests = Requests(manager(5, tokens_per_block=4, eviction_strategy=strategy))
    for token in (1, 2, 3, 4, 2, 2, 4, 1, 1, 5, 3):
        request = requests.new([token] * 5)
        assert requests.kv.allocate(request, 4, requests.kv.find_reuse(request)) == []
        requests.kv.store(request, 4)
        requests.kv.release(request)
    requests.admit([9] * 4)
    assert cached(requests, *([token] * 4 for token in range(1, 6))) == [token != victim for token in range(1, 6)]


def test_a_pinned_prefix_survives_any_pressure_until_it_is_unpinned() -> None:
    kv, _ = timed_manager(4, max_pinned_fraction=0.5)
    requests = Requests(kv)
    requests.serve([1] * 8)
    pin = kv.pin(requests.new([1] * 11))
    assert (pin.num_tokens, pin.num_blocks) == (8, 2)
    for token in range(10, 30):
        requests.serve([token] * 8)
    assert requests.num_found([1] * 9) == 8
    assert kv.num_free_blocks == 2
    kv.unpin(pin.pin_id)
    assert kv.num_free_blocks == 4
    with pytest.raises(BlockOwnershipError, match=f"pin {pin.pin_id} is not there"):
        kv.unpin(pin.pin_id)


def test_pins_share_blocks_and_are_refused_beyond_the_quota_with_the_numbers() -> None:
    kv, _ = timed_manager(8, max_pinned_fraction=0.5)
    requests = Requests(kv)
    requests.serve([1] * 12)
    requests.serve([1] * 8 + [2] * 8)
    first = kv.pin(requests.new([1] * 12))
    with pytest.raises(PinQuotaError, match="takes 2 more, but 3 of at most 4 are pinned"):
        kv.pin(requests.new([1] * 8 + [2] * 8))
    second = kv.pin(requests.new([1] * 8 + [2] * 4))
    kv.unpin(first.pin_id)
    assert kv.pins.num_pinned_blocks == 3
    kv.unpin(second.pin_id)
    with pytest.raises(PinError, match="no full block of this prefix is cached"):
        kv.pin(requests.new([5] * 8))


def test_a_pin_with_a_time_ends_by_itself() -> None:
    kv, clock = timed_manager(4)
    requests = Requests(kv)
    requests.serve([1] * 4)
    kv.pin(requests.new([1] * 4), seconds=5.0)
    clock.now += 4.9
    kv.refresh()
    assert kv.num_free_blocks == 3
    clock.now += 0.1
    kv.begin_step(0)
    kv.end_step(0)
    assert kv.num_free_blocks == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenRangeRetentionConfig(-1), "token_start is -1"),
        (lambda: TokenRangeRetentionConfig(4, 4), "token_end is 4"),
        (lambda: TokenRangeRetentionConfig(0, 4, 101), "priority is 101"),
        (lambda: TokenRangeRetentionConfig(0, 4, 50, 0), "duration_ms is 0"),
        (lambda: KvCacheRetentionConfig([], -1), "decode_retention_priority is -1"),
        (lambda: KvCacheRetentionConfig([], 5, timedelta(0)), "decode_duration_ms"),
        (
            lambda: KvCacheRetentionConfig([TokenRangeRetentionConfig(8), TokenRangeRetentionConfig(0, 9)]),
            r"\[0, 9\) and \[8, None\) overlap",
        ),
        (lambda: KvCacheConfig(0, 16), "num_blocks is 0; it must be at least 1"),
        (lambda: KvCacheConfig(4, 0), "tokens_per_block is 0"),
        (lambda: KvCacheConfig(4, 4, host_blocks=-1), "host_blocks is -1"),
        (
            lambda: KvCacheConfig(4, 4, max_pinned_fraction=1.5),
            "max_pinned_fraction is 1.5; it must be within 0.0 and 1.0",
        ),
        (lambda: KvCacheConfig(4, 4, attention_window=0), "attention_window is 0"),
        (lambda: KvCacheConfig(4, 4, attention_window=8, disk_blocks=2), "cannot be combined"),
        (lambda: KvCacheConfig(4, 4, secondary_offload_min_priority=101), "secondary_offload_min_priority is 101"),
    ],
)
def test_a_configuration_out_of_range_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(InvalidKvCacheConfigError, match=message):
        make()  # type: ignore[operator]
