"""What is found again, and which blocks are given: traces published for other block managers, and our own."""

from __future__ import annotations

import pytest

from batch_manager.kv import BlockOwnershipError, KvCacheError, StaleReuseError
from batch_manager.plan import BlockCopy
from batch_manager.request import MultimodalSpan, Request
from tests.batch_manager.kv_helpers import Requests, blocks_of, manager

COMMON = blocks_of(0, 1, 2)


def eviction_order(num_blocks: int, requests: Requests) -> list[int]:
    """The blocks in the order in which they are handed out when one request takes all."""
    everything = requests.new([10_000 + i for i in range(num_blocks * requests.kv.tokens_per_block)])
    assert requests.kv.allocate(everything, len(everything.token_ids)) == []
    return everything.block_ids


def test_a_shared_prefix_is_held_twice_and_blocks_come_back_in_the_published_order() -> None:
    """vLLM's `test_prefill`, whose blocks 1 to 10 are 0 to 9 here (it reserves its block 0)."""
    kv = manager(10)
    requests = Requests(kv)
    first = requests.compute(COMMON + [3] * 7)
    assert first.block_ids == [0, 1, 2, 3]
    second = requests.compute(COMMON + [3] * 5)
    assert second.block_ids == [0, 1, 2, 4]
    assert (second.num_reused_tokens, kv.num_free_blocks) == (48, 5)
    kv.release(first)
    kv.release(second)
    assert eviction_order(10, requests) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    assert requests.num_found(COMMON) == 0


def test_blocks_are_evicted_from_the_end_of_the_prefix_released_first() -> None:
    """vLLM's `test_evict`."""
    kv = manager(10, enable_partial_reuse=False)
    requests = Requests(kv)
    prompt = list(range(5 * 16 + 7))
    first = requests.compute(prompt)
    second = requests.compute(list(range(200, 200 + 3 * 16)))
    assert first.block_ids == [0, 1, 2, 3, 4, 5]
    assert second.block_ids == [6, 7, 8]
    kv.release(first)
    kv.release(second)
    assert kv.num_free_blocks == 10
    third = requests.admit(prompt[: 2 * 16 + 3])
    assert third.block_ids == [0, 1, 5]
    assert kv.num_free_blocks == 7
    kv.release(third)
    assert eviction_order(10, requests) == [5, 9, 4, 3, 2, 8, 7, 6, 1, 0]


def test_a_growing_request_gets_a_block_when_the_last_is_full_and_stores_only_full_ones() -> None:
    """vLLM's `test_decode`: 55 tokens, 4 more need no block, 19 more need one."""
    kv = manager(10)
    requests = Requests(kv)
    request = requests.compute(COMMON + [3] * 7)
    requests.generate(request, [8] * 4)
    assert request.block_ids == [0, 1, 2, 3]
    requests.generate(request, [7] * (5 + 10 + 4))
    assert request.block_ids == [0, 1, 2, 3, 4]
    assert requests.num_found([*request.token_ids, 1]) == 4 * 16


def test_found_blocks_are_not_evicted_to_make_room_for_the_rest_of_the_same_request() -> None:
    """vLLM's `test_computed_blocks_not_evicted`."""
    kv = manager(2)
    requests = Requests(kv)
    requests.serve(list(range(16)))
    requests.serve(list(range(16, 32)))
    request = requests.admit(list(range(32)))
    assert request.block_ids == [0, 1]
    assert request.num_reused_tokens == 16


def test_a_failed_allocation_changes_nothing() -> None:
    """vLLM's `test_prefill_not_enough_free_blocks_with_computed_blocks`."""
    kv = manager(10)
    requests = Requests(kv)
    first = requests.compute(COMMON)
    second = requests.compute(COMMON + [3] * 16 * 3)
    kv.release(first)
    holder = requests.admit([9] * 16 * 3)
    too_long = requests.new(COMMON + [3] * 32 + [5] * 64)
    before = kv.ledger()
    reuse = kv.find_reuse(too_long)
    assert reuse.num_tokens == 80
    assert kv.num_new_blocks(too_long, len(too_long.token_ids), reuse) == 4
    assert kv.num_free_blocks == 1
    assert kv.allocate(too_long, len(too_long.token_ids), reuse) is None
    assert (too_long.block_ids, too_long.num_computed_tokens) == ([], 0)
    assert kv.ledger() == before
    assert len(second.block_ids) + len(holder.block_ids) == 9


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"cache_salt": 7}, 47),
        ({"cache_salt": 8}, 0),
        ({}, 0),
        ({"adapter_id": 7}, 0),
        ({"adapter_id": 7, "cache_salt": 7}, 0),
    ],
)
def test_only_equal_salts_and_adapters_share_and_a_salt_is_not_an_adapter(other: dict[str, int], found: int) -> None:
    requests = Requests(manager(10))
    requests.serve(COMMON, cache_salt=7)
    assert requests.num_found(COMMON, **other) == found


def test_equal_hashes_of_different_tokens_share_nothing() -> None:
    """Python hashes x and x + 2**61 - 1 alike."""
    token, twin = 5, 5 + 2**61 - 1
    assert hash((token,) * 4) == hash((twin,) * 4)
    requests = Requests(manager(10, tokens_per_block=4))
    requests.serve([token] * 8)
    assert requests.num_found([twin] * 8) == 0


def test_equal_placeholders_share_only_when_they_stand_for_the_same_part_of_the_same_item() -> None:
    requests = Requests(manager(20, tokens_per_block=4))
    prompt = [1, 2, 9, 9, 9, 9, 9, 9, 3]
    cat = {"multimodal_spans": [MultimodalSpan(2, 6, b"cat")]}
    requests.serve(prompt, **cat)
    assert requests.num_found(prompt, **cat) == 8
    assert requests.num_found(prompt, multimodal_spans=[MultimodalSpan(2, 6, b"dog")]) == 0
    assert requests.num_found(prompt, multimodal_spans=[MultimodalSpan(1, 7, b"cat")]) == 0
    assert requests.num_found(prompt) == 0
    requests.serve([1, 2, 9, 9])
    assert requests.num_found([1, 2, 9, 8, 7]) == 3
    assert requests.num_found([1, 2, 9, 8, 7], **cat) == 0


def test_chunks_of_a_long_prompt_are_found_before_the_request_ends() -> None:
    kv = manager(10)
    requests = Requests(kv)
    request = requests.admit(COMMON + [3] * 7)
    assert requests.num_found([*COMMON, 4]) == 0
    kv.store(request, 40)
    assert requests.num_found([*COMMON, 4]) == 32
    kv.store(request, 55)
    assert requests.num_found([*COMMON, 4]) == 48


def test_two_new_requests_name_the_same_missing_block_exactly_when_they_would_compute_the_same() -> None:
    kv = manager(20)
    requests = Requests(kv)

    def key(tokens: list[int], **options: int) -> object:
        return kv.find_reuse(requests.new(tokens, **options)).first_missing_key

    assert key([*COMMON, 1]) == key([*COMMON, 2]) != key(blocks_of(7, 1, 2))
    assert key(COMMON) != key(COMMON, cache_salt=1)
    assert key([1] * 15) is None
    requests.serve(COMMON[:16])
    assert key([*COMMON, 1]) == key(COMMON[:32]) != key(blocks_of(0, 7))
    requests.serve(COMMON)
    assert key(COMMON) is None
    assert key([*COMMON, 1]) is None


def test_the_last_token_is_always_left_to_compute() -> None:
    requests = Requests(manager(10, enable_partial_reuse=False))
    requests.serve(COMMON)
    assert [requests.num_found(COMMON[:n]) for n in (1, 16, 17, 32, 33, 48)] == [0, 0, 16, 16, 32, 32]
    assert requests.num_found([*COMMON, 5]) == 48


def test_a_partly_matching_block_in_use_is_copied() -> None:
    kv = manager(10, tokens_per_block=4)
    requests = Requests(kv)
    first = requests.compute([1, 2, 3, 4, 5, 6, 7, 8])
    second = requests.new([1, 2, 3, 4, 5, 6, 9, 9, 9])
    reuse = kv.find_reuse(second)
    assert reuse.partial is not None
    assert (reuse.num_tokens, reuse.partial.source, reuse.partial.num_tokens) == (6, 1, 2)
    assert kv.num_new_blocks(second, 9, reuse) == 2
    assert kv.allocate(second, 9, reuse) == [BlockCopy(1, 2, 2)]
    assert second.block_ids == [0, 2, 3]
    assert second.num_computed_tokens == 6
    assert first.block_ids == [0, 1]


@pytest.mark.parametrize(("num_blocks", "copies"), [(2, False), (10, False), (2, True)])
def test_a_partly_matching_block_that_nobody_needs_is_taken_over_rather_than_evict_for_a_copy(
    num_blocks: int, copies: bool
) -> None:
    kv = manager(num_blocks, tokens_per_block=4, copy_on_partial_reuse=copies)
    requests = Requests(kv)
    requests.serve([1, 2, 3, 4, 5, 6, 7, 8])
    second = requests.new([1, 2, 3, 4, 5, 6, 9, 9])
    reuse = kv.find_reuse(second)
    assert kv.allocate(second, 8, reuse) == []
    assert second.block_ids == [0, 1]
    assert requests.num_found([1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_a_partly_matching_block_is_copied_while_there_are_unused_blocks() -> None:
    kv = manager(3, tokens_per_block=4)
    requests = Requests(kv)
    requests.serve([1, 2, 3, 4, 5, 6, 7, 8])
    second = requests.new([1, 2, 3, 4, 5, 6, 9, 9])
    assert kv.allocate(second, 8, kv.find_reuse(second)) == [BlockCopy(1, 2, 2)]
    assert requests.num_found([1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_without_copying_only_a_block_nobody_holds_is_reused_in_part() -> None:
    kv = manager(10, tokens_per_block=4, copy_on_partial_reuse=False)
    requests = Requests(kv)
    first = requests.compute([1, 2, 3, 4])
    assert requests.num_found([1, 2, 9]) == 0
    kv.release(first)
    second = requests.new([1, 2, 9])
    reuse = kv.find_reuse(second)
    assert reuse.num_tokens == 2
    requests.admit([1, 2, 3, 4, 5])
    with pytest.raises(StaleReuseError, match="request 2 were evicted or moved"):
        kv.allocate(second, 3, reuse)


def test_source_and_target_of_a_copy_stay_until_the_step_that_copies_is_done() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    first = requests.compute([1, 2, 3, 4])
    second = requests.admit([1, 2, 9, 9])
    kv.release(first)
    kv.release(second)
    assert kv.num_free_blocks == 2
    kv.begin_step(0)
    assert kv.num_free_blocks == 2
    kv.end_step(0)
    assert kv.num_free_blocks == 4


def test_the_longest_of_many_partly_matching_blocks_is_found() -> None:
    requests = Requests(manager(100, tokens_per_block=4))
    for token in range(40):
        requests.serve([token // 10, token % 10, token, token])
    assert requests.num_found([2, 7, 27, 1, 1]) == 3
    assert requests.num_found([2, 7, 99, 1, 1]) == 2
    assert requests.num_found([2, 99, 99, 1, 1]) == 1
    assert requests.num_found([99, 99, 99, 1, 1]) == 0


def test_a_match_ends_on_a_block_boundary_when_partial_reuse_is_off() -> None:
    """SGLang's page alignment: page size, cached length -> multiple of the page."""
    for size, length in ((1, 5), (2, 5), (4, 6)):
        requests = Requests(manager(10, tokens_per_block=size, enable_partial_reuse=False))
        requests.serve(list(range(length)))
        assert requests.num_found([*range(length), 99]) == length // size * size


def test_what_two_requests_compute_at_once_is_kept_once_and_takes_no_more_blocks_than_each_asked_for() -> None:
    """A request that also held the other one's copy would take more than was reserved for it."""
    kv = manager(10)
    requests = Requests(kv)
    first, second = requests.admit(COMMON), requests.admit(COMMON)
    num_free = kv.num_free_blocks
    kv.store(first, 48)
    kv.store(second, 48)
    assert first.block_ids == second.block_ids
    assert kv.num_free_blocks == num_free + 3
    requests.generate(second, [5] * 16)
    kv.release(first)
    assert requests.num_found(second.token_ids) == 63
    kv.check_invariants()
    kv.release(second)
    assert kv.ledger().counts.cached == 4
    assert kv.num_free_blocks == 10


def conversation(requests: Requests, tokens: list[int], **options: int) -> Request:
    """A request of which all tokens but the last one generated are in the pool, and that is over."""
    request = requests.admit(tokens[:9], **options)
    request.token_ids += tokens[9:]
    assert requests.kv.allocate(request, len(tokens) - 1) == []
    requests.kv.store_last_block(request, len(tokens) - 1)
    blocks = list(request.block_ids)
    requests.kv.release(request)
    request.block_ids = blocks
    return request


def test_a_partly_filled_last_block_is_kept_and_found_in_part_by_requests_of_the_same_adapter() -> None:
    """TensorRT-LLM's `BlockManagerReuseWithLoraTaskIdTest`: the same prompt again gets blocks 0, 1, 3; the conversation
    goes on in block 2; the last token is never stored; another adapter or none finds nothing."""
    kv = manager(16, tokens_per_block=4)
    requests = Requests(kv)
    tokens = list(range(100, 111))
    first = conversation(requests, tokens, adapter_id=1)
    assert first.block_ids == [0, 1, 2]
    again = requests.admit(tokens[:9], adapter_id=1)
    assert (again.block_ids, again.num_reused_tokens) == ([0, 1, 3], 8)
    kv.release(again)
    goes_on = requests.new([*tokens, 5], adapter_id=1)
    reuse = kv.find_reuse(goes_on)
    assert reuse.num_tokens == 10
    assert kv.allocate(goes_on, 12, reuse) == []
    assert goes_on.block_ids == [0, 1, 2]
    kv.release(goes_on)
    for adapter_id in (2, None):
        assert kv.find_reuse(requests.new(tokens, adapter_id=adapter_id)).num_tokens == 0
    kv.check_invariants()


def test_a_partly_filled_block_that_differs_further_on_is_copied_and_stays() -> None:
    kv = manager(16, tokens_per_block=4)
    requests = Requests(kv)
    tokens = list(range(100, 112))
    conversation(requests, tokens)
    other = requests.new([*tokens[:10], 7, 7])
    reuse = kv.find_reuse(other)
    assert reuse.num_tokens == 10
    assert kv.allocate(other, 12, reuse) == [BlockCopy(2, 3, 2)]
    assert requests.num_found([*tokens, 1]) == 11


def test_a_last_block_with_a_multimodal_item_is_not_kept_in_part() -> None:
    kv = manager(16, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1, 2, 3, 4, 9, 9], multimodal_spans=[MultimodalSpan(4, 2, b"cat")])
    kv.store_last_block(request, 6)
    kv.release(request)
    assert kv.ledger().counts.cached == 1


def test_nothing_is_found_when_reuse_is_off() -> None:
    kv = manager(10, enable_block_reuse=False)
    requests = Requests(kv)
    requests.serve(COMMON)
    assert requests.num_found(COMMON) == 0
    assert kv.ledger().counts.free == 10


def test_a_hundred_salts_leave_nothing_behind_when_their_blocks_are_gone() -> None:
    kv = manager(4, tokens_per_block=2)
    requests = Requests(kv)
    for salt in range(100):
        requests.serve([1, 2, 3, 4], cache_salt=salt)
        requests.serve([1], cache_salt=1000 + salt)
    assert len(kv.cache.tree.roots) <= 2


def test_reuse_that_was_evicted_in_between_is_refused_and_nothing_changes() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    late = requests.new([1] * 9)
    reuse = kv.find_reuse(late)
    requests.admit([2] * 16)
    assert not kv.is_current(reuse)
    with pytest.raises(StaleReuseError, match="call find_reuse again"):
        kv.allocate(late, 9, reuse)
    assert late.block_ids == []


def test_misuse_is_named() -> None:
    kv = manager(10, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1] * 8)
    twin = Request(request.request_id, [2] * 8, 1)
    with pytest.raises(BlockOwnershipError, match="request id 0 holds blocks already"):
        kv.allocate(twin, 8, kv.find_reuse(twin))
    with pytest.raises(BlockOwnershipError, match="request 0 has 2 blocks"):
        kv.allocate(request, 8, kv.find_reuse(request))
    twin.block_ids = [5]
    for call in (lambda: kv.release(twin), lambda: kv.allocate(twin, 12)):
        with pytest.raises(BlockOwnershipError, match="request 0 has"):
            call()
    with pytest.raises(KvCacheError, match="store up to 12 tokens, but only 8"):
        kv.store(request, 12)
    kv.release(request)
    again = requests.new([1] * 8 + [2])
    with pytest.raises(KvCacheError, match="3 tokens asked for, 8 found"):
        kv.allocate(again, 3, kv.find_reuse(again))
    with pytest.raises(KvCacheError, match="retention is 'long'"):
        requests.admit([1], retention="long")
    kv.check_invariants()


def test_cleared_blocks_are_never_found_and_free_when_their_requests_end() -> None:
    kv = manager(10)
    requests = Requests(kv)
    requests.serve(blocks_of(7, 8))
    request = requests.compute(COMMON)
    kv.clear()
    assert requests.num_found(COMMON) == requests.num_found(blocks_of(7, 8)) == 0
    requests.generate(request, [5] * 16)
    assert requests.num_found(request.token_ids) == 0
    kv.check_invariants()
    kv.release(request)
    assert kv.ledger().counts.free == 10


def test_stats_count_hits_and_misses_in_blocks() -> None:
    kv = manager(10)
    requests = Requests(kv)
    requests.serve(COMMON)
    requests.admit([*COMMON, 5])
    stats = kv.stats()
    assert (stats.alloc_total_blocks, stats.alloc_new_blocks) == (7, 4)
    assert (stats.reused_blocks, stats.missed_blocks, stats.cache_hit_rate) == (3, 3, 0.5)
    assert (stats.max_num_blocks, stats.used_num_blocks, stats.free_num_blocks) == (10, 4, 6)
