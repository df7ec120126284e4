"""Blocks below the device: kept on eviction, brought back on a hit, dropped when damaged."""

from __future__ import annotations

import pytest

from batch_manager import BatchManager, BatchManagerConfig
from batch_manager.kv import (
    BlockOwnershipError,
    BlockTransfer,
    CacheTier,
    KvCacheManager,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from batch_manager.request import Request
from tests.batch_manager.kv_helpers import Requests, manager

DEVICE, HOST, DISK = CacheTier


def tiered(num_blocks: int, host: int, disk: int = 0, **options: float) -> KvCacheManager:
    options = {"offload_free_fraction": 1.0, "enable_partial_reuse": False, **options}
    return manager(num_blocks, tokens_per_block=4, host_blocks=host, disk_blocks=disk, **options)


def settle(kv: KvCacheManager, at_most: int = 100) -> list[BlockTransfer]:
    """Carry out all transfers, and those that follow from them."""
    done: list[BlockTransfer] = []
    while orders := kv.take_transfers():
        assert len(done) < at_most, "transfers without end"
        for order in orders:
            assert kv.acknowledge_transfer(order.transfer_id, True) == []
        done += orders
    kv.check_invariants()
    return done


def ways(orders: list[BlockTransfer]) -> list[tuple[CacheTier, CacheTier]]:
    return [(order.source_tier, order.target_tier) for order in orders]


def test_a_cached_prefix_is_backed_up_first_block_first_and_its_eviction_loses_nothing() -> None:
    kv = tiered(4, host=4)
    requests = Requests(kv)
    requests.serve([1, 2, 3, 4, 5, 6, 7, 8])
    orders = kv.take_transfers()
    assert [(o.source_tier, o.source_slot, o.target_tier, o.target_slot) for o in orders] == [
        (DEVICE, 0, HOST, 0),
        (DEVICE, 1, HOST, 1),
    ]
    for order in orders:
        kv.acknowledge_transfer(order.transfer_id, True)
    kv.release(requests.admit([9] * 16))
    request = requests.new([1, 2, 3, 4, 5, 6, 7, 8, 9])
    reuse = kv.find_reuse(request)
    assert reuse.num_tokens == 8
    assert kv.num_new_blocks(request, 9, reuse) == 3
    assert kv.allocate(request, 9, reuse) == []
    assert (request.num_computed_tokens, len(request.block_ids)) == (8, 3)
    assert kv.is_loading(request)
    loads = kv.take_transfers()
    assert ways(loads) == [(HOST, DEVICE)] * 2
    assert [load.target_slot for load in loads] == request.block_ids[:2]
    assert [load.block_hash for load in loads] == [order.block_hash for order in orders]
    kv.acknowledge_transfer(loads[0].transfer_id, True)
    assert kv.is_loading(request)
    kv.acknowledge_transfer(loads[1].transfer_id, True)
    assert not kv.is_loading(request)
    kv.check_invariants()


def test_blocks_below_the_offload_priority_and_all_behind_them_are_dropped() -> None:
    kv = tiered(4, host=4)
    requests = Requests(kv)
    ranges = [TokenRangeRetentionConfig(0, 4, 30), TokenRangeRetentionConfig(4, 8, 29), TokenRangeRetentionConfig(8)]
    requests.serve([1] * 12, retention=KvCacheRetentionConfig(ranges))
    assert len(settle(kv)) == 1
    requests.serve([2] * 16)
    assert requests.num_found([1] * 12) == 4


def test_nothing_is_backed_up_while_most_of_the_device_is_free() -> None:
    kv = tiered(10, host=4, offload_free_fraction=0.5)
    requests = Requests(kv)
    requests.serve([1] * 20)
    assert kv.take_transfers() == []
    requests.serve([2] * 4)
    assert len(settle(kv)) == 4


def test_at_most_so_many_blocks_are_backed_up_in_a_step() -> None:
    kv = tiered(10, host=10, max_offloads_per_step=2)
    requests = Requests(kv)
    requests.serve([1] * 20)
    assert [len(kv.take_transfers()) for _ in range(4)] == [2, 2, 1, 0]


def test_host_blocks_spill_to_disk_and_come_back_from_there() -> None:
    kv = tiered(4, host=2, disk=8)
    requests = Requests(kv)
    for token in (1, 2, 3):
        requests.serve([token] * 8)
        settle(kv)
    request = requests.admit([1] * 8 + [5])
    assert request.num_reused_tokens == 8
    assert ways(settle(kv))[:2] == [(DISK, DEVICE)] * 2
    assert not kv.is_loading(request)


def test_without_a_host_tier_blocks_go_straight_to_disk() -> None:
    kv = tiered(2, host=0, disk=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    assert ways(settle(kv)) == [(DEVICE, DISK)] * 2
    requests.serve([2] * 8)
    assert requests.num_found([1] * 9) == 8


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_fails_is_a_miss_and_those_who_waited_start_again(failing: int) -> None:
    kv = tiered(4, host=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    settle(kv)
    kv.release(requests.admit([9] * 16))
    first, second = requests.admit([1] * 9), requests.admit([1] * 8 + [2])
    other = requests.new([3])
    loads = kv.take_transfers()
    again: list[Request] = []
    for index, load in enumerate(loads):
        again += kv.acknowledge_transfer(load.transfer_id, index != failing)
        kv.check_invariants()
    assert again == [first, second]
    assert [(r.block_ids, r.num_computed_tokens, r.num_reused_tokens) for r in again] == [([], 0, 0)] * 2
    assert requests.num_found([1] * 9) == 4 * failing
    assert kv.num_free_blocks == 4
    assert kv.cache.transfers is not None
    assert kv.cache.transfers.counts == (2, 1, 1)
    assert kv.allocate(other, 1) == []


def test_a_request_that_ends_while_its_blocks_load_leaves_them_to_others_once_loaded() -> None:
    kv = tiered(4, host=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    settle(kv)
    kv.release(requests.admit([9] * 16))
    request = requests.admit([1] * 9)
    loads = kv.take_transfers()
    kv.release(request)
    assert kv.num_free_blocks == 2
    second = requests.admit([1] * 9)
    assert kv.is_loading(second)
    for load in loads:
        kv.acknowledge_transfer(load.transfer_id, True)
    assert not kv.is_loading(second)
    kv.release(second)
    assert kv.num_free_blocks == 4


def test_a_block_that_is_being_backed_up_is_not_evicted() -> None:
    kv = tiered(2, host=2)
    requests = Requests(kv)
    requests.serve([1] * 8)
    orders = kv.take_transfers()
    assert kv.num_free_blocks == 0
    assert kv.allocate(requests.new([2] * 4), 4) is None
    kv.acknowledge_transfer(orders[0].transfer_id, True)
    assert kv.num_free_blocks == 0
    kv.acknowledge_transfer(orders[1].transfer_id, True)
    assert kv.num_free_blocks == 2


def test_a_failed_offload_leaves_the_block_where_it_was_and_frees_the_slot() -> None:
    kv = tiered(2, host=2)
    requests = Requests(kv)
    requests.serve([1] * 4)
    (order,) = kv.take_transfers()
    assert kv.acknowledge_transfer(order.transfer_id, False) == []
    kv.check_invariants()
    assert requests.num_found([1] * 5) == 4
    requests.serve([2] * 8)
    assert requests.num_found([1] * 5) == 0


def test_a_transfer_is_acknowledged_once() -> None:
    kv = tiered(2, host=2)
    Requests(kv).serve([1] * 4)
    (order,) = kv.take_transfers()
    kv.acknowledge_transfer(order.transfer_id, True)
    for manager_ in (kv, manager(2)):
        with pytest.raises(BlockOwnershipError, match=f"transfer {order.transfer_id} is not in flight"):
            manager_.acknowledge_transfer(order.transfer_id, True)


def test_a_full_host_tier_drops_its_least_recently_used_leaf() -> None:
    kv = tiered(2, host=2)
    requests = Requests(kv)
    for token in (1, 2, 3):
        requests.serve([token] * 4)
        settle(kv)
    requests.serve([4] * 8)
    assert [requests.num_found([token] * 5) for token in (1, 2, 3)] == [0, 4, 4]


def test_a_block_computed_again_takes_its_place_in_the_device_pool() -> None:
    kv = tiered(3, host=4)
    requests = Requests(kv)
    requests.serve([1] * 4)
    settle(kv)
    requests.serve([2] * 12)
    request = requests.new([1] * 4)
    assert kv.allocate(request, 4) == []
    kv.store(request, 4)
    kv.check_invariants()
    assert kv.find_reuse(requests.new([1] * 5)).block_ids == request.block_ids


def test_a_tier_too_small_for_a_prefix_keeps_its_beginning_and_copies_nothing_in_circles() -> None:
    kv = tiered(8, host=2)
    requests = Requests(kv)
    requests.serve([1] * 12)
    assert len(settle(kv)) == 2
    requests.serve([2] * 16)
    assert len(settle(kv)) <= 4
    requests.serve([3] * 32)
    assert requests.num_found([2] * 17) == 8


def test_a_prefix_longer_than_the_host_tier_goes_on_to_disk_and_then_everything_rests() -> None:
    """Its later blocks used to take the host slots of its first ones before those were on disk, for ever."""
    kv = tiered(8, host=2, disk=8, max_offloads_per_step=2)
    requests = Requests(kv)
    requests.serve([1] * 28)
    orders = settle(kv, at_most=16)
    assert ways(orders).count((HOST, DISK)) >= 5
    requests.serve([2] * 32)
    assert requests.num_found([1] * 29) == 28


def test_a_tier_that_fails_is_not_asked_again_for_the_same_blocks() -> None:
    kv = tiered(4, host=4)
    requests = Requests(kv)
    requests.serve([1] * 8)
    for order in kv.take_transfers():
        kv.acknowledge_transfer(order.transfer_id, False)
    assert kv.take_transfers() == []
    requests.serve([1] * 9)
    assert len(kv.take_transfers()) == 2


def test_a_request_waits_for_blocks_that_are_being_backed_up_instead_of_being_paused() -> None:
    kv = tiered(4, host=8)
    batch_manager = BatchManager(BatchManagerConfig(), kv)
    Requests(kv).serve([1] * 8)
    request = Request(7, [2] * 7, 4)
    batch_manager.add_request(request)
    for _ in range(2):
        plan = batch_manager.schedule()
        batch_manager.update(plan, [[5] for _ in plan.scheduled])
    assert len(request.block_ids) == 2
    orders = kv.take_transfers()
    assert (len(orders), kv.num_blocks_in_transfer, kv.num_free_blocks) == (2, 2, 0)
    assert batch_manager.schedule().is_empty
    assert request.num_pauses == 0
    for order in orders:
        kv.acknowledge_transfer(order.transfer_id, True)
    assert [entry.request for entry in batch_manager.schedule().scheduled] == [request]


def test_a_load_need_not_wait_for_an_offload_that_was_ordered_before() -> None:
    kv = tiered(8, host=16)
    requests = Requests(kv)
    for token in (1, 2, 3, 4):
        requests.serve([token] * 8)
    settle(kv)
    requests.serve([6] * 8)
    offloads = kv.take_transfers()
    request = requests.admit([1] * 8 + [5])
    loads = kv.take_transfers()
    assert ways(offloads) == [(DEVICE, HOST)] * 2
    assert ways(loads) == [(HOST, DEVICE)] * 2
    for order in loads:
        kv.acknowledge_transfer(order.transfer_id, True)
    assert not kv.is_loading(request)
    for order in offloads:
        kv.acknowledge_transfer(order.transfer_id, True)
    kv.check_invariants()
