"""Traces whose outcome is published: the policies decide as documented, iteration by iteration.

Pools are in tokens, 10 to a block unless said otherwise; every sampled row gives one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager import CapacitySchedulerPolicy, ContextChunkingPolicy, WaitCode, WaitingQueuePolicy
from tests.batch_manager.harness import Harness, ids, sizes

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
PRIORITY = WaitingQueuePolicy.PRIORITY

Trace = Sequence[tuple[int, Sequence[int]]]
"""(first iteration, ids of the requests that run from then on), the last entry: (number of iterations, ())."""


def check(iterations: Sequence[Sequence[int]], trace: Trace) -> None:
    expected = []
    for (begin, running), (end, _) in pairwise(trace):
        expected += [sorted(running)] * (end - begin)
    assert [list(running) for running in iterations] == expected


def run(harness: Harness, arrivals: dict[int, Sequence[tuple[int, int, int, float]]]) -> list[list[int]]:
    """Ids by iteration. `arrivals`: iteration -> (id, prompt, new tokens, priority)."""
    iterations = []
    while harness.manager.has_work or any(begin >= len(iterations) for begin in arrivals):
        for request_id, prompt, new, priority in arrivals.get(len(iterations), ()):
            harness.add(request_id, prompt, new, priority=priority)
        iterations.append(sorted(sizes(harness.step())))
    return iterations


# Capacity


@pytest.mark.parametrize(
    ("pool", "policy", "iterations"),
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
    pool: int, policy: CapacitySchedulerPolicy, iterations: int
) -> None:
    harness = Harness(num_blocks=pool // 10, capacity_scheduler_policy=policy)
    harness.add(0, 10, 80)
    harness.add(1, 10, 80)
    harness.run()
    assert harness.num_iterations == iterations


def test_max_utilization_pauses_the_second_request_when_51_and_51_tokens_need_12_blocks() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION)
    harness.add(0, 10, 80)
    second = harness.add(1, 10, 80)
    plans = harness.run()
    check(ids(plans), [(0, (0, 1)), (41, (0,)), (80, (1,)), (119, ())])
    assert plans[41].paused == [second]
    resumed = plans[80].scheduled[0]
    assert (resumed.start, resumed.num_scheduled_tokens) == (0, 51)


def test_max_utilization_with_two_later_arrivals_pauses_the_last_started_ones_and_keeps_the_order() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION, max_batch_size=4)
    iterations = run(harness, {0: [(0, 10, 80, 0.5), (1, 10, 80, 0.5)], 10: [(2, 10, 80, 0.5), (3, 10, 80, 0.5)]})
    check(
        iterations,
        [
            (0, (0, 1)),
            (10, (0, 1, 2, 3)),
            (21, (0, 1)),
            (41, (0,)),
            (80, (1, 2)),
            (90, (1,)),
            (119, (2, 3)),
            (139, (2,)),
            (178, (3,)),
            (227, ()),
        ],
    )


def test_max_utilization_with_two_urgent_arrivals_pauses_the_least_urgent_ones_first() -> None:
    harness = Harness(
        num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION, max_batch_size=4, waiting_queue_policy=PRIORITY
    )
    harness.step_seconds = 0.0
    iterations = run(harness, {0: [(0, 10, 80, 0.5), (1, 10, 80, 0.5)], 10: [(2, 10, 80, 0.6), (3, 10, 80, 0.7)]})
    check(
        iterations,
        [
            (0, (0, 1)),
            (10, (0, 1, 2, 3)),
            (21, (0, 2, 3)),
            (31, (2, 3)),
            (51, (3,)),
            (90, (2,)),
            (129, (0, 1)),
            (139, (0,)),
            (178, (1,)),
            (227, ()),
        ],
    )


@pytest.mark.parametrize(
    ("policy", "trace"),
    [
        (MAX_UTILIZATION, [(0, (0, 1)), (41, (1,)), (80, (0,)), (119, ())]),
        (GUARANTEED_NO_EVICT, [(0, (1,)), (80, (0,)), (160, ())]),
    ],
)
def test_of_two_requests_that_do_not_fit_together_the_more_urgent_one_runs_on(
    policy: CapacitySchedulerPolicy, trace: Trace
) -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=policy, waiting_queue_policy=PRIORITY)
    check(run(harness, {0: [(0, 10, 80, 0.5), (1, 10, 80, 0.6)]}), trace)


def test_urgent_arrivals_take_the_places_of_running_requests_when_all_are_taken() -> None:
    harness = Harness(
        num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION, max_batch_size=2, waiting_queue_policy=PRIORITY
    )
    harness.step_seconds = 0.0
    iterations = run(harness, {0: [(0, 10, 10, 0.5), (1, 10, 10, 0.5)], 2: [(2, 10, 10, 0.6), (3, 10, 10, 0.7)]})
    check(iterations, [(0, (0, 1)), (2, (2, 3)), (12, (0, 1)), (20, ())])


def test_requests_are_ordered_by_priority_and_by_arrival_within_one() -> None:
    harness = Harness(max_batch_size=1, waiting_queue_policy=PRIORITY)
    priorities = (0.5, 0.5, 0.6, 0.6, 0.6, 1.0, 0.3, 0.3, 0.3, 0.6, 1.0, 0.5)
    for request_id, priority in enumerate(priorities):
        harness.add(request_id, 10, 1, priority=priority)
    assert ids(harness.run()) == [[request_id] for request_id in (5, 10, 2, 3, 4, 9, 0, 1, 11, 6, 7, 8)]


@pytest.mark.parametrize("policy", [MAX_UTILIZATION, GUARANTEED_NO_EVICT, STATIC_BATCH])
def test_prompts_of_50_in_chunks_of_20_with_40_tokens_to_generate_take_42_iterations(
    policy: CapacitySchedulerPolicy,
) -> None:
    harness = Harness(num_blocks=20, long_prompt_cap=20, chunk_unit_size=10, capacity_scheduler_policy=policy)
    harness.add(0, 50, 40)
    harness.add(1, 50, 40)
    plans = harness.run()
    assert [sizes(plan) for plan in plans[:4]] == [{0: 20, 1: 20}] * 2 + [{0: 10, 1: 10}] + [{0: 1, 1: 1}]
    assert harness.num_iterations == 42


def test_prompts_of_30_in_chunks_of_20_run_together_until_51_and_51_tokens_need_12_blocks() -> None:
    harness = Harness(num_blocks=10, long_prompt_cap=20, chunk_unit_size=10, capacity_scheduler_policy=MAX_UTILIZATION)
    iterations = run(harness, {0: [(0, 30, 60, 0.5), (1, 30, 60, 0.5)]})
    check(iterations, [(0, (0, 1)), (22, (0,)), (61, (1,)), (100, ())])


def test_prompts_of_30_in_chunks_of_20_run_one_after_the_other_if_they_must_not_be_paused() -> None:
    harness = Harness(num_blocks=10, max_num_tokens=20, chunk_unit_size=10)
    iterations = run(harness, {0: [(0, 30, 60, 0.5), (1, 30, 60, 0.5)]})
    check(iterations, [(0, (0,)), (61, (1,)), (122, ())])


@pytest.mark.parametrize(("prompt", "new", "ends"), [(10, 80, 80), (30, 60, 61)])
def test_guaranteed_completion_runs_later_arrivals_one_by_one(prompt: int, new: int, ends: int) -> None:
    harness = Harness(num_blocks=10, max_batch_size=4, max_num_tokens=20, chunk_unit_size=10)
    iterations = run(
        harness, {0: [(0, prompt, new, 0.5), (1, prompt, new, 0.5)], 10: [(2, prompt, new, 0.5), (3, prompt, new, 0.5)]}
    )
    check(iterations, [(0, (0,)), (ends, (1,)), (2 * ends, (2,)), (3 * ends, (3,)), (4 * ends, ())])


def test_a_context_that_starts_in_chunks_takes_the_blocks_of_its_whole_prompt_at_once() -> None:
    harness = Harness(num_blocks=10, max_num_tokens=40, chunk_unit_size=10, capacity_scheduler_policy=MAX_UTILIZATION)
    iterations = run(harness, {0: [(0, 70, 20, 0.5), (1, 70, 20, 0.5)]})
    check(iterations, [(0, (0,)), (21, (1,)), (42, ())])


@pytest.mark.parametrize(
    ("policy", "iterations"), [(MAX_UTILIZATION, 150), (GUARANTEED_NO_EVICT, 100), (STATIC_BATCH, 100)]
)
def test_adapters_of_20_pages_in_a_cache_of_30_run_one_at_a_time_or_with_their_like(
    policy: CapacitySchedulerPolicy, iterations: int
) -> None:
    harness = Harness(num_blocks=21, capacity_scheduler_policy=policy, num_adapter_pages=30, max_batch_size=4)
    for request_id, adapter in enumerate((7, 8, 7)):
        harness.add(request_id, 10, 50, adapter_id=adapter, adapter_pages=20)
    plans = harness.run()
    if policy is MAX_UTILIZATION:
        check(ids(plans), [(0, (0,)), (50, (1,)), (100, (2,)), (150, ())])
    else:
        check(ids(plans), [(0, (0, 2)), (50, (1,)), (100, ())])
    assert harness.num_iterations == iterations


@pytest.mark.parametrize("policy", [MAX_UTILIZATION, GUARANTEED_NO_EVICT, STATIC_BATCH])
def test_adapters_of_15_pages_in_a_cache_of_30_run_together(policy: CapacitySchedulerPolicy) -> None:
    harness = Harness(num_blocks=21, capacity_scheduler_policy=policy, num_adapter_pages=30, max_batch_size=4)
    for request_id, adapter in enumerate((7, 8, 7)):
        harness.add(request_id, 10, 50, adapter_id=adapter, adapter_pages=15)
    check(ids(harness.run()), [(0, (0, 1, 2)), (50, ())])


def test_a_static_batch_ends_before_the_next_one_starts() -> None:
    harness = Harness(num_blocks=20, capacity_scheduler_policy=STATIC_BATCH, max_batch_size=2)
    iterations = run(harness, {0: [(0, 10, 80, 0.5), (1, 10, 40, 0.5), (2, 10, 80, 0.5)]})
    check(iterations, [(0, (0, 1)), (40, (0,)), (80, (2,)), (160, ())])


# Requests that share a prefix


@pytest.mark.parametrize(
    ("policy", "trace"),
    [
        (MAX_UTILIZATION, [(0, (0,)), (1, (0, 1, 2)), (2, (1, 2)), (3, ())]),
        (GUARANTEED_NO_EVICT, [(0, (0,)), (1, (0, 1, 2)), (2, (1, 2)), (3, ())]),
        (STATIC_BATCH, [(0, (0, 1, 2)), (2, ())]),
    ],
)
def test_duplicates_wait_for_the_first_ones_context(policy: CapacitySchedulerPolicy, trace: Trace) -> None:
    harness = Harness(num_blocks=20, enable_block_reuse=True, capacity_scheduler_policy=policy)
    requests = [harness.add(request_id, range(21), 2) for request_id in range(3)]
    check(ids(harness.run()), trace)
    if policy is not STATIC_BATCH:
        assert [request.receipt.num_reused_tokens for request in requests] == [0, 20, 20]


@pytest.mark.parametrize("policy", [MAX_UTILIZATION, GUARANTEED_NO_EVICT])
def test_a_duplicate_waits_until_all_chunks_of_the_shared_prefix_are_computed(
    policy: CapacitySchedulerPolicy,
) -> None:
    harness = Harness(
        num_blocks=20,
        enable_block_reuse=True,
        capacity_scheduler_policy=policy,
        long_prompt_cap=20,
        chunk_unit_size=10,
    )
    harness.add(0, range(50), 40)
    duplicate = harness.add(1, range(50), 40)
    check(ids(harness.run()), [(0, (0,)), (3, (0, 1)), (42, (1,)), (43, ())])
    assert duplicate.receipt.num_reused_tokens >= 40


@pytest.mark.parametrize("policy", [MAX_UTILIZATION, GUARANTEED_NO_EVICT])
def test_of_five_requests_those_with_a_longer_common_prefix_start_one_after_the_other(
    policy: CapacitySchedulerPolicy,
) -> None:
    harness = Harness(num_blocks=100, enable_block_reuse=True, capacity_scheduler_policy=policy)
    prompts = [range(1, 12), range(2, 23), range(11), range(21), range(31)]
    for request_id, prompt in enumerate(prompts):
        harness.add(request_id, prompt, 80)
    iterations = ids(harness.run())
    check(
        iterations,
        [(0, (0, 1, 2)), (1, (0, 1, 2, 3)), (2, (0, 1, 2, 3, 4)), (80, (3, 4)), (81, (4,)), (82, ())],
    )


@pytest.mark.parametrize("policy", [MAX_UTILIZATION, GUARANTEED_NO_EVICT])
@pytest.mark.parametrize(
    ("pool", "prompts", "trace"),
    [
        (100, (range(20), range(20)), [(0, (0,)), (1, (0, 1)), (5, (1,)), (6, ())]),
        (60, (range(30), range(30)), [(0, (0,)), (1, (0, 1)), (5, (1,)), (6, ())]),
        (50, (range(20), range(20)), [(0, (0,)), (1, (0, 1)), (5, (1,)), (6, ())]),
        (200, (range(30), [*range(20), *[999] * 10]), [(0, (0,)), (1, (0, 1)), (5, (1,)), (6, ())]),
        (200, ([100] * 20, [200] * 20), [(0, (0, 1)), (5, ())]),
    ],
    ids=["same", "three-blocks", "tight-pool", "same-beginning", "different"],
)
def test_a_second_request_starts_when_the_blocks_it_shares_are_there(
    policy: CapacitySchedulerPolicy, pool: int, prompts: Sequence[Sequence[int]], trace: Trace
) -> None:
    harness = Harness(num_blocks=pool // 10, enable_block_reuse=True, capacity_scheduler_policy=policy)
    for request_id, prompt in enumerate(prompts):
        harness.add(request_id, prompt, 5)
    check(ids(harness.run()), trace)


# Micro batch


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


def test_four_requests_run_two_at_a_time() -> None:
    harness = Harness(max_batch_size=2)
    iterations = run(harness, {0: [(request_id, 10, 80, 0.5) for request_id in range(4)]})
    check(iterations, [(0, (0, 1)), (80, (2, 3)), (160, ())])


def test_equal_progress_goes_by_units_and_lets_the_last_chunk_exceed_one() -> None:
    harness = Harness(max_num_tokens=7, chunk_unit_size=5, context_chunking_policy=EQUAL_PROGRESS, max_batch_size=2)
    harness.add(0, 12, 5)
    harness.add(1, 12, 5)
    assert [sizes(plan) for plan in harness.run()] == [
        {0: 5},
        {0: 7},
        {0: 1, 1: 5},
        {0: 1, 1: 5},
        {0: 1, 1: 2},
        {0: 1, 1: 1},
        {1: 1},
        {1: 1},
        {1: 1},
    ]


def test_equal_progress_keeps_a_capped_chunk_to_whole_units() -> None:
    harness = Harness(long_prompt_cap=12, chunk_unit_size=5, context_chunking_policy=EQUAL_PROGRESS, max_batch_size=2)
    for request_id, prompt in enumerate((10, 10, 10, 17)):
        harness.add(request_id, prompt, 5)
    plans = [sizes(plan) for plan in harness.run()]
    assert plans[0] == {0: 10, 1: 10}
    assert plans[5:7] == [{2: 10, 3: 10}, {2: 1, 3: 7}]
    assert len(plans) == 11


def test_equal_progress_leaves_out_a_prompt_that_gets_no_unit() -> None:
    harness = Harness(max_num_tokens=5, chunk_unit_size=5, context_chunking_policy=EQUAL_PROGRESS)
    harness.add(0, 12, 5)
    harness.add(1, 12, 5)
    assert sizes(harness.step()) == {0: 5}


def test_without_chunking_a_context_joins_only_when_it_fits_beside_the_generations() -> None:
    harness = Harness(max_num_tokens=12, max_batch_size=4, enable_chunked_context=False)
    for request_id in range(4):
        harness.add(request_id, 10, 10)
    check(
        ids(harness.run()),
        [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (10, (1, 2, 3)), (11, (2, 3)), (12, (3,)), (20, ())],
    )


def test_beams_of_4_count_as_four_rows_each() -> None:
    harness = Harness(max_num_tokens=15, max_batch_size=4, enable_chunked_context=False)
    for request_id in range(4):
        harness.add(request_id, 10, 10, beam_width=4)
    check(
        ids(harness.run()),
        [(0, (0,)), (1, (0, 1)), (10, (1, 2)), (11, (2, 3)), (20, (3,)), (21, ())],
    )


def test_requests_of_another_beam_width_than_the_first_sit_out_and_are_told_so() -> None:
    harness = Harness(max_batch_size=4)
    for request_id, beam_width in enumerate((1, 4, 1)):
        harness.add(request_id, 2, 5, beam_width=beam_width)
    plans = [harness.step()]
    assert harness.manager.explain(1) == (WaitCode.BEAM_WIDTH, 4, 1, (0, 2), None)
    plans += harness.run()
    check(ids(plans), [(0, (0, 2)), (5, (1,)), (10, ())])


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=12))
def test_beam_widths_never_share_an_iteration_and_every_width_has_its_turn(
    requests: list[tuple[int, int, int]],
) -> None:
    harness = Harness(max_batch_size=4, max_num_tokens=16)
    for request_id, (beam_width, prompt, new) in enumerate(requests):
        harness.add(request_id, prompt, new, beam_width=beam_width)
    for plan in harness.run(limit=30 * len(requests)):
        assert len({entry.request.beam_width for entry in plan.scheduled}) == 1


@pytest.mark.parametrize(
    ("budget", "unit", "prompt", "drafts", "expected"),
    [(8192, 64, 2041, 8, [7, 7, 7, 7]), (40, 16, 3, 17, [13, 13, 5])],
)
def test_drafts_that_do_not_fit_are_cut_to_the_chunk_unit_their_prompt_ends_in(
    budget: int, unit: int, prompt: int, drafts: int, expected: list[int]
) -> None:
    harness = Harness(max_num_tokens=budget, chunk_unit_size=unit)
    for request_id in range(len(expected)):
        harness.add(request_id, prompt, 21).draft_token_ids = list(range(drafts))
    plan = harness.manager.schedule()
    assert [entry.num_draft_tokens for entry in plan.scheduled] == expected
    assert plan.num_tokens <= budget


def test_without_chunking_drafts_count_when_contexts_are_fitted() -> None:
    harness = Harness(max_num_tokens=4096, enable_chunked_context=False)
    for request_id in range(4):
        harness.add(request_id, 1024, 10).draft_token_ids = list(range(17))
    assert ids([harness.manager.schedule()]) == [[0, 1, 2]]


def test_of_four_generations_with_63_drafts_two_fill_a_budget_of_128() -> None:
    harness = Harness(max_num_tokens=128)
    requests = [harness.add(request_id, 2, 100) for request_id in range(4)]
    harness.step()
    for request in requests:
        request.draft_token_ids = list(range(63))
    assert sizes(harness.manager.schedule()) == {0: 64, 1: 64}


@pytest.mark.parametrize(
    ("policy", "budget", "num_requests", "prompt", "reused", "expected"),
    [
        (ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, 7, 3, 20, 15, {0: 5, 1: 2}),
        (EQUAL_PROGRESS, 3, 2, 15, 10, {0: 2, 1: 1}),
    ],
)
def test_reused_tokens_do_not_count_in_the_budget(
    policy: ContextChunkingPolicy,
    budget: int,
    num_requests: int,
    prompt: int,
    reused: int,
    expected: dict[int, int],
) -> None:
    harness = Harness(
        enable_block_reuse=True, tokens_per_block=5, max_num_tokens=budget, context_chunking_policy=policy
    )
    harness.add(9, [*range(reused), 1, 2], 1)
    harness.run()
    for request_id in range(num_requests):
        own = [100 * (request_id + 1) + position for position in range(prompt - reused)]
        harness.add(request_id, [*range(reused), *own], 5)
    assert sizes(harness.step()) == expected
