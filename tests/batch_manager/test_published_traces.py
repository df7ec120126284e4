"""Traces whose outcome is published: the policies decide as documented, iteration by iteration."""

from __future__ import annotations

import pytest

from batch_manager import CapacitySchedulerPolicy, ContextChunkingPolicy
from tests.batch_manager.harness import Harness, ids, sizes

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


@pytest.mark.parametrize(
    ("pool_tokens", "policy", "iterations"),
    [
        (200, MAX_UTILIZATION, 80),
        (200, GUARANTEED_NO_EVICT, 80),
        (200, STATIC_BATCH, 80),
        (100, MAX_UTILIZATION, 119),
        (100, GUARANTEED_NO_EVICT, 160),
        (100, STATIC_BATCH, 160),
    ],
)
def test_two_requests_of_10_and_80_tokens_take_the_published_number_of_iterations(
    pool_tokens: int, policy: CapacitySchedulerPolicy, iterations: int
) -> None:
    harness = Harness(num_blocks=pool_tokens // 10, capacity_scheduler_policy=policy)
    harness.add(0, 10, 80)
    harness.add(1, 10, 80)
    harness.run()
    assert harness.num_iterations == iterations


def test_max_utilization_pauses_the_second_request_when_51_and_51_tokens_need_12_blocks_of_10() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION)
    harness.add(0, 10, 80)
    second = harness.add(1, 10, 80)
    plans = harness.run()
    assert ids(plans) == [[0, 1]] * 41 + [[0]] * 39 + [[1]] * 39
    assert plans[41].paused == [second]
    resumed = plans[80].scheduled[0]
    assert (resumed.start, resumed.num_scheduled_tokens) == (0, 51)


def test_three_prompts_of_800_share_a_budget_of_1024_with_a_cap_of_400_each() -> None:
    harness = Harness(max_num_tokens=1024, long_prompt_cap=400)
    for request_id in range(3):
        harness.add(request_id, 800, 10)
    assert sizes(harness.step()) == {0: 400, 1: 400, 2: 224}
    assert sizes(harness.step()) == {0: 400, 1: 400, 2: 224}
    assert sizes(harness.step()) == {0: 1, 1: 1, 2: 352}


def test_the_long_prompt_cap_does_not_count_for_a_prompt_that_is_alone() -> None:
    harness = Harness(max_num_tokens=1024, long_prompt_cap=400)
    harness.add(0, 2000, 10)
    assert sizes(harness.step()) == {0: 1024}


def test_the_long_prompt_cap_counts_as_soon_as_there_is_another_request() -> None:
    harness = Harness(max_num_tokens=1024, long_prompt_cap=400)
    harness.add(0, 2000, 10)
    harness.add(1, 10, 10)
    assert sizes(harness.step()) == {0: 400, 1: 10}


@pytest.mark.parametrize(("chunked", "started"), [(True, [0, 1]), (False, [0])])
def test_a_prompt_that_does_not_fit_the_budget_is_not_overtaken(chunked: bool, started: list[int]) -> None:
    harness = Harness(max_num_tokens=1024, max_batch_size=3, enable_chunked_context=chunked)
    for request_id, prompt in enumerate((800, 800, 10, 10)):
        harness.add(request_id, prompt, 10)
    assert ids([harness.step()]) == [started]


def test_of_10_offered_requests_a_cap_of_3_active_ones_lets_3_run_and_7_wait() -> None:
    harness = Harness(max_num_active=3)
    for request_id in range(10):
        harness.add(request_id, 10, 10)
    assert ids([harness.step()]) == [[0, 1, 2]]
    assert (harness.manager.num_running, harness.manager.num_waiting) == (3, 7)


def test_equal_progress_goes_by_units_and_lets_the_last_chunk_exceed_one() -> None:
    harness = Harness(max_num_tokens=7, chunk_unit_size=5, context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)
    request = harness.add(0, 12, 1)
    harness.step()
    assert request.num_computed_tokens == 5
    harness.step()
    assert request.is_finished
    assert harness.num_iterations == 2


@pytest.mark.parametrize(
    ("policy", "iterations"), [(MAX_UTILIZATION, 150), (GUARANTEED_NO_EVICT, 100), (STATIC_BATCH, 100)]
)
def test_adapters_of_20_pages_in_a_cache_of_30_run_one_at_a_time_or_with_their_like(
    policy: CapacitySchedulerPolicy, iterations: int
) -> None:
    harness = Harness(capacity_scheduler_policy=policy, num_adapter_pages=30)
    for request_id, adapter in enumerate((7, 8, 7)):
        harness.add(request_id, 10, 50, adapter_id=adapter, adapter_pages=20)
    plans = harness.run()
    assert harness.num_iterations == iterations
    if policy is not MAX_UTILIZATION:
        assert ids(plans) == [[0, 2]] * 50 + [[1]] * 50


def test_a_prompt_of_50_in_chunks_of_20_with_40_tokens_to_generate_takes_42_iterations() -> None:
    harness = Harness(max_num_tokens=20, chunk_unit_size=10)
    harness.add(0, 50, 40)
    harness.run()
    assert harness.num_iterations == 42
