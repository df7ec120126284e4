"""Fences, leases, the ledger, leaks, and the attention window."""

from __future__ import annotations

import pytest

from batch_manager.kv import NO_BLOCK, BlockOwnershipError, LedgerEntry, OwnerKind, StepOrderError
from tests.batch_manager.kv_helpers import Requests, blocks_of, manager


def test_blocks_released_while_a_step_is_in_flight_are_not_handed_out_before_it_ends() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1] * 6)
    kv.begin_step(0)
    kv.release(request)
    assert kv.num_free_blocks == 2
    assert kv.num_fenced_blocks == 2
    assert requests.num_found([1] * 5) == 4
    kv.end_step(0)
    assert (kv.num_free_blocks, kv.num_fenced_blocks) == (4, 0)


def test_a_fenced_block_that_is_found_again_is_not_freed_when_the_step_ends() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1] * 4)
    kv.begin_step(0)
    kv.release(request)
    again = requests.admit([1] * 5)
    assert again.block_ids[0] == 0
    kv.end_step(0)
    assert kv.num_free_blocks == 2


def test_a_block_waits_for_every_step_that_was_in_flight_in_whatever_order_they_end() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.admit([1] * 4)
    kv.begin_step(0)
    kv.begin_step(1)
    kv.release(request)
    kv.begin_step(2)
    kv.end_step(1)
    assert kv.num_free_blocks == 3
    kv.end_step(0)
    assert kv.num_free_blocks == 4
    kv.end_step(2)


def test_a_block_released_when_nothing_is_in_flight_is_free_at_once() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.admit([1] * 4)
    kv.begin_step(0)
    kv.end_step(0)
    kv.release(request)
    assert kv.num_free_blocks == 4


def test_steps_begin_in_order_and_end_once() -> None:
    kv = manager(4)
    kv.begin_step(3)
    with pytest.raises(StepOrderError, match="step 3 begins after step 3"):
        kv.begin_step(3)
    kv.end_step(3)
    with pytest.raises(StepOrderError, match="step 3 ends, but the steps in flight are"):
        kv.end_step(3)


def test_a_lease_keeps_cached_and_private_blocks_after_the_request_is_gone() -> None:
    kv = manager(4, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1] * 6)
    first, second = kv.lease(request, "peer 7"), kv.lease(request, "peer 8")
    kv.release(request)
    assert kv.num_free_blocks == 2
    assert kv.ledger().counts.leased == 2
    kv.end_lease(first)
    assert kv.num_free_blocks == 2
    kv.begin_step(0)
    kv.end_lease(second)
    assert kv.num_free_blocks == 2
    kv.end_step(0)
    assert kv.num_free_blocks == 4
    with pytest.raises(BlockOwnershipError, match="a lease ends once"):
        kv.end_lease(first)


def test_a_leased_private_block_that_becomes_cached_stays_kept() -> None:
    kv = manager(3, tokens_per_block=4)
    requests = Requests(kv)
    request = requests.compute([1] * 6)
    lease = kv.lease(request, "peer")
    requests.generate(request, [1, 1])
    kv.release(request)
    kv.check_invariants()
    assert kv.num_free_blocks == 1
    kv.end_lease(lease)
    assert kv.num_free_blocks == 3


def test_the_ledger_names_owner_iteration_and_call_of_every_held_block() -> None:
    kv = manager(8, tokens_per_block=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    kv.begin_step(4)
    request = requests.admit([1] * 9)
    requests.kv.release(requests.admit([5]))
    lease = kv.lease(request, "peer 7")
    entries = kv.ledger().entries
    assert LedgerEntry(0, OwnerKind.REQUEST, "request 1", 1, 5, "allocate, found in the cache") in entries
    assert LedgerEntry(2, OwnerKind.REQUEST, "request 1", 1, 5, "allocate") in entries
    assert LedgerEntry(3, OwnerKind.STEP, "step 4", 4, 4, "release") in entries
    assert LedgerEntry(1, OwnerKind.LEASE, f"lease {lease} (peer 7)", lease, 5, "lease") in entries
    assert kv.ledger().counts == (4, 3, 0, 1)


def test_a_leak_is_reported_once_with_its_owner_and_quarantined_and_the_rest_goes_on() -> None:
    kv = manager(8, tokens_per_block=4)
    requests = Requests(kv)
    leaked = requests.compute([1] * 6)
    alive = requests.admit([2] * 4)
    assert kv.find_leaks([leaked.request_id, alive.request_id]) == []
    leaks = kv.find_leaks([alive.request_id])
    assert leaks == [("request 0", [0, 1], 0, "allocate")]
    assert kv.find_leaks([alive.request_id]) == []
    kv.check_invariants()
    assert kv.num_free_blocks == 5
    assert kv.ledger().counts.leased == 2
    requests.next_id = leaked.request_id
    assert requests.admit([1] * 5).num_reused_tokens == 4
    assert kv.free_quarantined() == 1
    kv.check_invariants()


def test_blocks_that_nobody_has_are_found_and_can_be_taken_back() -> None:
    kv = manager(8, tokens_per_block=4)
    lost = kv.pool.free.pop()
    assert kv.find_leaks([]) == [("nobody", [lost], None, None)]
    assert kv.find_leaks([]) == []
    assert kv.free_quarantined() == 1
    assert kv.num_free_blocks == 8


def test_blocks_outside_the_attention_window_go_back_and_a_long_request_fits_a_small_pool() -> None:
    kv = manager(5, tokens_per_block=4, attention_window=8)
    requests = Requests(kv)
    request = requests.compute([0] * 4)
    requests.generate(request, list(range(1, 200)))
    held = [block for block in request.block_ids if block != NO_BLOCK]
    assert len(held) <= 4
    assert request.block_ids[: -len(held)] == [NO_BLOCK] * (len(request.block_ids) - len(held))
    kv.check_invariants()


def test_blocks_that_fell_out_of_the_window_are_found_by_others_until_evicted() -> None:
    kv = manager(20, tokens_per_block=4, attention_window=8)
    requests = Requests(kv)
    request = requests.compute(blocks_of(*range(8), tokens_per_block=4))
    assert request.block_ids[:4] == [NO_BLOCK] * 4
    assert requests.num_found(blocks_of(0, 1, 9, tokens_per_block=4)) == 8


def test_a_prefix_is_found_behind_evicted_blocks_when_all_its_window_needs_is_there() -> None:
    kv = manager(8, tokens_per_block=4, attention_window=8)
    requests = Requests(kv)
    prompt = blocks_of(*range(8), tokens_per_block=4)
    request = requests.compute(prompt)
    requests.serve([99] * 12)
    reuse = kv.find_reuse(requests.new([*prompt, 5]))
    assert reuse.num_tokens == 32
    assert reuse.block_ids == request.block_ids
    kv.release(request)
    longer = requests.admit([*prompt, 5])
    assert longer.block_ids[:5] == [NO_BLOCK] * 5
    assert requests.num_found(prompt[:13]) == 0
    kv.check_invariants()


def test_a_step_may_feed_again_up_to_a_block_of_tokens_and_still_finds_its_window() -> None:
    for window in range(1, 14):
        kv = manager(30, tokens_per_block=4, attention_window=window)
        requests = Requests(kv)
        request = requests.compute([7] * 5)
        for _ in range(30):
            requests.generate(request, [7])
            first_fed_again = max(len(request.token_ids) - 4, 0)
            first_read = max(first_fed_again - window + 1, 0)
            assert NO_BLOCK not in request.block_ids[first_read // 4 :]
