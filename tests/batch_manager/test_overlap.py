"""Iteration n + 1 is planned before the tokens of iteration n are known."""

from __future__ import annotations

from collections import deque

import pytest

from batch_manager import (
    CapacitySchedulerPolicy,
    FinishReason,
    IterationPlan,
    RequestState,
    StepOrderError,
    WaitingQueuePolicy,
)
from tests.batch_manager.harness import Harness, sizes

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def run_overlapped(harness: Harness) -> list[IterationPlan]:
    """Always two iterations in flight, as far as there is something to plan."""
    plans: list[IterationPlan] = []
    in_flight: deque[IterationPlan] = deque()
    while harness.manager.has_work:
        plan = harness.manager.schedule()
        if not plan.is_empty:
            plans.append(plan)
            in_flight.append(plan)
        if len(in_flight) == 2 or plan.is_empty:
            harness.finish(in_flight.popleft())
    assert not in_flight, "an iteration was planned whose results nobody needs"
    return plans


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5])
def test_no_token_is_computed_in_vain_for_requests_that_end_by_length(max_new_tokens: int) -> None:
    harness = Harness(max_steps_in_flight=2, max_num_tokens=16)
    requests = [harness.add(request_id, 7 + request_id, max_new_tokens) for request_id in range(6)]
    plans = run_overlapped(harness)
    scheduled = sum(sum(sizes(plan).values()) for plan in plans)
    assert scheduled == sum(request.num_prompt_tokens + max_new_tokens - 1 for request in requests)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


def test_a_request_goes_on_from_a_token_that_is_not_known_yet() -> None:
    harness = Harness(max_steps_in_flight=2)
    request = harness.add(0, 10, 5)
    harness.manager.schedule()
    second = harness.manager.schedule().scheduled[0]
    assert (second.start, second.num_scheduled_tokens, second.num_tokens_with_spec) == (10, 1, 11)
    assert (len(request.token_ids), request.num_placeholder_tokens) == (10, 2)


def test_aborted_requests_get_no_tokens_from_the_steps_that_were_in_flight() -> None:
    harness = Harness(max_steps_in_flight=2)
    requests = [harness.add(request_id, 10, 20) for request_id in range(10)]
    in_flight = deque([harness.manager.schedule(), harness.manager.schedule()])
    for count, request_id in enumerate((0, 8, 3, 1, 6, 4, 2, 5, 7, 9)):
        assert harness.manager.cancel_request(request_id)
        harness.finish(in_flight.popleft())
        in_flight.append(harness.manager.schedule())
        if in_flight[-1].is_empty:
            in_flight.pop()
        assert requests[request_id].num_generated_tokens == count
        assert requests[request_id].finish_reason is FinishReason.CANCELLED
    while in_flight:
        harness.finish(in_flight.popleft())
    assert harness.kv.num_free_blocks == harness.kv.num_blocks


def test_the_token_of_a_paused_request_that_was_in_flight_is_kept() -> None:
    """A pool of 10 blocks of 16, two prompts of 80: the first one's next token pauses the second."""
    harness = Harness(
        num_blocks=10, tokens_per_block=16, max_steps_in_flight=2, capacity_scheduler_policy=MAX_UTILIZATION
    )
    first, second = harness.add(0, 80, 10), harness.add(1, 80, 10)
    in_flight = harness.manager.schedule()
    blocked = harness.manager.schedule()
    assert blocked.paused == [second]
    assert blocked.is_empty, "the blocks are still in use by the step in flight"
    harness.manager.update(in_flight, [[41], [42]])
    assert (first.token_ids[-1], second.token_ids[-1]) == (41, 42)
    assert sizes(harness.manager.schedule()) == {0: 1}
    assert second.state is RequestState.PAUSED


@pytest.mark.parametrize("drafts", [[], [5, 6, 7]])
def test_a_paused_request_does_not_come_back_before_the_step_it_has_a_part_in_has_ended(drafts: list[int]) -> None:
    """Its blocks are taken for an urgent request, which is cancelled before it could have them."""
    harness = Harness(
        num_blocks=10,
        max_steps_in_flight=2,
        capacity_scheduler_policy=MAX_UTILIZATION,
        waiting_queue_policy=WaitingQueuePolicy.PRIORITY,
    )
    request = harness.add(0, 18, 20, priority=0.1)
    harness.step()
    harness.step()
    request.draft_token_ids = list(drafts)
    in_flight = harness.manager.schedule()
    harness.add(1, 81, 5, priority=1.0)
    assert harness.manager.schedule().paused == [request]
    harness.manager.cancel_request(1)
    assert harness.manager.schedule().is_empty
    harness.manager.update(in_flight, [[*drafts[:1], 42]])
    harness.run()
    assert request.token_ids[20 : 21 + len(drafts[:1])] == [*drafts[:1], 42]
    assert request.finish_reason is FinishReason.LENGTH
    receipt = request.receipt
    num_lost = 20 + len(drafts[:1])
    assert [pause.num_lost_tokens for pause in receipt.pauses] == [num_lost]
    assert receipt.num_recomputed_tokens == num_lost
    assert receipt.num_computed_tokens == num_lost + 18 + 20 - 1


def test_blocks_of_a_finished_request_are_not_handed_out_while_a_step_may_read_them() -> None:
    harness = Harness(num_blocks=2, max_steps_in_flight=2)
    harness.add(0, 10, 10)
    harness.add(1, 10, 10)
    first, second = harness.manager.schedule(), harness.manager.schedule()
    assert sizes(second) == {0: 1}
    harness.manager.cancel_request(0)
    harness.finish(first)
    assert harness.manager.schedule().is_empty
    harness.finish(second)
    assert sizes(harness.manager.schedule()) == {1: 10}


def test_a_request_whose_drafts_are_being_verified_sits_out_until_it_is_known_where_it_goes_on() -> None:
    harness = Harness(max_steps_in_flight=2)
    request = harness.add(0, 10, 50)
    harness.add(1, 10, 50)
    harness.step()
    request.draft_token_ids = [7, 8, 9]
    verifying = harness.manager.schedule()
    assert sizes(verifying) == {0: 4, 1: 1}
    beside = harness.manager.schedule()
    assert sizes(beside) == {1: 1}
    harness.manager.update(verifying, [[7, 8, 30], [5]])
    assert request.token_ids[-3:] == [7, 8, 30]
    assert request.num_computed_tokens == 13
    harness.manager.update(beside, [[6]])
    entry = next(entry for entry in harness.manager.schedule().scheduled if entry.request is request)
    assert (entry.start, entry.num_scheduled_tokens) == (13, 1)


def test_plans_are_updated_in_the_order_in_which_they_were_made() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(0, 10, 10)
    first, second = harness.manager.schedule(), harness.manager.schedule()
    with pytest.raises(StepOrderError, match="iteration 1 is not the oldest in flight, which is 0"):
        harness.manager.update(second, [[5]])
    with pytest.raises(StepOrderError, match="2 iterations are in flight"):
        harness.manager.schedule()
    harness.finish(first)
    harness.finish(second)
    with pytest.raises(StepOrderError, match="nothing is"):
        harness.finish(second)


def test_without_overlap_only_one_iteration_is_in_flight() -> None:
    harness = Harness()
    harness.add(0, 10, 10)
    harness.manager.schedule()
    with pytest.raises(StepOrderError, match="update or abandon iteration 0 first"):
        harness.manager.schedule()
