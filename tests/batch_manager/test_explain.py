"""Every waiting request has a reason with the numbers behind it."""

from __future__ import annotations

import pytest

from batch_manager import (
    CapacitySchedulerPolicy,
    UnknownRequestError,
    WaitCode,
    WaitingQueuePolicy,
    WaitReason,
)
from tests.batch_manager.harness import Harness, sizes


def test_a_reservation_that_does_not_fit_is_explained_with_blocks_and_holders() -> None:
    harness = Harness(num_blocks=10)
    harness.add(0, 10, 50)
    harness.add(1, 10, 60)
    harness.add(2, 10, 10)
    harness.step()
    assert harness.manager.explain(0) is None
    assert harness.manager.explain(1) == WaitReason(WaitCode.KV_RESERVATION, 7, 4, holders=(0,))
    assert harness.manager.explain(2) == WaitReason(WaitCode.KV_RESERVATION, 7, 4, holders=(0,), behind=1)
    assert str(harness.manager.explain(2)) == "kv_reservation: needs 7, available 4, held by 0 (behind request 1)"


def test_under_max_utilization_small_requests_run_beside_a_large_reservation() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION)
    harness.add(0, 10, 90)
    for request_id in range(1, 4):
        harness.add(request_id, 10, 5)
    assert sizes(harness.step()) == {0: 10, 1: 10, 2: 10, 3: 10}


def test_blocks_for_a_context_that_are_not_there_are_explained() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION)
    harness.add(0, 75, 5)
    harness.add(1, 30, 5)
    harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.KV_CAPACITY, 3, 2, holders=(0,))


def test_a_paused_request_and_the_headroom_kept_after_pauses_are_explained() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION)
    harness.add(0, 10, 80)
    paused = harness.add(1, 10, 80)
    for _ in range(42):
        harness.step()
    assert paused.num_pauses == 1
    reason = harness.manager.explain(1)
    assert reason == WaitReason(WaitCode.KV_CAPACITY, 6, 4, holders=(0,))
    harness.manager._life.governor.caution = 1.0
    harness.step()
    reason = harness.manager.explain(1)
    assert reason == WaitReason(WaitCode.PAUSE_HEADROOM, 6, 1, holders=(0,))


def test_blocks_that_come_free_by_a_pause_are_kept_for_those_that_run() -> None:
    harness = Harness(
        num_blocks=10,
        capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        waiting_queue_policy=WaitingQueuePolicy.FAIR,
    )
    harness.add(0, 10, 80, tenant="a")
    harness.add(1, 10, 80, tenant="a")
    for _ in range(41):
        harness.step()
    harness.add(2, 10, 5, tenant="b")
    assert harness.step().paused
    assert harness.manager.explain(2) == WaitReason(WaitCode.PAUSE_HEADROOM, 1, 0, holders=(0,))
    assert sizes(harness.step()) == {0: 1, 2: 10}


def test_a_full_batch_a_spent_budget_and_a_static_batch_are_explained() -> None:
    harness = Harness(max_batch_size=1)
    harness.add(0, 10, 5)
    harness.add(1, 10, 5)
    assert harness.manager.explain(1) == WaitReason(WaitCode.NEXT_ITERATION, 0, 0)
    harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.BATCH_SIZE, 2, 1, holders=(0,))

    harness = Harness(max_num_tokens=10)
    harness.add(0, 10, 5)
    harness.add(1, 10, 5)
    harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.TOKEN_BUDGET, 1, 0, holders=(0,))

    harness = Harness(capacity_scheduler_policy=CapacitySchedulerPolicy.STATIC_BATCH)
    harness.add(0, 10, 5)
    harness.step()
    harness.add(1, 10, 5)
    harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.STATIC_BATCH, 0, 1, holders=(0,))


def test_waiting_for_another_ones_prefix_names_it() -> None:
    harness = Harness(enable_block_reuse=True)
    harness.add(0, range(25), 5)
    harness.add(1, range(25), 5)
    harness.manager.schedule()
    reason = harness.manager.explain(1)
    assert reason is not None
    assert (reason.code, reason.holders) == (WaitCode.PREFIX_DEFERRED, (0,))


def test_waiting_for_adapter_pages_tells_how_many_there_are_now_and_who_has_the_others() -> None:
    harness = Harness(num_adapter_pages=30)
    harness.add(0, 10, 5, adapter_id=1, adapter_pages=20)
    harness.add(1, 10, 5, adapter_id=2, adapter_pages=20)
    harness.add(2, 10, 5, adapter_id=3, adapter_pages=4)
    harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.ADAPTER_PAGES, 20, 6, holders=(0, 2))
    harness.manager.cancel_request(2)
    assert harness.manager.explain(1) == WaitReason(WaitCode.ADAPTER_PAGES, 20, 10, holders=(0,))


def test_what_one_is_told_is_what_is_told_of_all() -> None:
    harness = Harness(num_blocks=10, num_adapter_pages=30, max_batch_size=4)
    for request_id in range(12):
        harness.add(request_id, 10, 20, adapter_id=request_id % 3, adapter_pages=12)
    while harness.manager.has_work:
        reasons = harness.manager.explain_all()
        for request_id in harness.manager._life.requests:
            assert harness.manager.explain(request_id) == reasons.get(request_id)
        harness.step()


def test_a_tenant_beyond_its_share_is_told_so() -> None:
    harness = Harness(max_batch_size=1, waiting_queue_policy=WaitingQueuePolicy.FAIR)
    for request_id, tenant in enumerate(("greedy", "greedy", "modest")):
        harness.add(request_id, 50, 20, tenant=tenant)
    for _ in range(5):
        harness.step()
    assert harness.manager.explain(1) == WaitReason(WaitCode.FAIR_SHARE, 50, 0, behind=2)
    reason = harness.manager.explain(2)
    assert reason is not None
    assert (reason.code, reason.behind) == (WaitCode.BATCH_SIZE, None)


def test_held_requests_wait_for_what_they_are_held_for_and_keep_their_place() -> None:
    harness = Harness(max_batch_size=1)
    held = harness.add(0, 10, 2, held_for=WaitCode.GRAMMAR)
    harness.add(1, 10, 1)
    harness.add(2, 10, 1)
    assert sizes(harness.step()) == {1: 10}
    reason = harness.manager.explain(held.request_id)
    assert reason is not None
    assert reason.code is WaitCode.GRAMMAR
    harness.manager.release_hold(0)
    assert sizes(harness.step()) == {0: 10}


def test_pausing_and_draining_are_explained() -> None:
    harness = Harness()
    harness.add(0, 10, 5)
    harness.step()
    harness.manager.drain()
    harness.add(1, 10, 5)
    harness.step()
    reason = harness.manager.explain(1)
    assert reason is not None
    assert reason.code is WaitCode.DRAINING
    harness.manager.resume()
    harness.manager.pause()
    reasons = harness.manager.explain_all()
    assert {request_id: reason.code for request_id, reason in reasons.items()} == {
        0: WaitCode.PAUSED_BY_OPERATOR,
        1: WaitCode.PAUSED_BY_OPERATOR,
    }


def test_a_running_request_that_does_not_advance_is_explained() -> None:
    harness = Harness(max_batch_size=4)
    for request_id, beam_width in enumerate((1, 4)):
        harness.add(request_id, 2, 9, beam_width=beam_width)
    harness.step()
    harness.step()
    reason = harness.manager.explain(1)
    assert reason is not None
    assert (reason.code, reason.needed, reason.available) == (WaitCode.BEAM_WIDTH, 4, 1)


def test_only_live_requests_can_be_explained() -> None:
    harness = Harness()
    with pytest.raises(UnknownRequestError, match="no live request 7"):
        harness.manager.explain(7)
