"""When a request ends, and what of the sampled tokens is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager import CapacitySchedulerPolicy, FinishReason, InvalidSampledTokensError, Request
from batch_manager.speculation import SpeculationStats
from batch_manager.stop import append_until_stop, check_stop
from tests.batch_manager.harness import Harness

END, STOP = 2, 42


@pytest.mark.parametrize(
    ("sampled", "fields", "kept", "reason"),
    [
        ([END, 10, 11], {"end_id": END}, [END], FinishReason.END_ID),
        ([10, STOP, 12], {"stop_token_ids": [STOP]}, [10, STOP], FinishReason.STOP_WORDS),
        ([10, 11, 12], {"max_new_tokens": 2}, [10, 11], FinishReason.LENGTH),
        ([END, 10, 11], {}, [END, 10, 11], FinishReason.NOT_FINISHED),
        ([END], {"end_id": END, "stop_token_ids": [END]}, [END], FinishReason.END_ID),
        ([END], {"end_id": END, "max_new_tokens": 1}, [END], FinishReason.END_ID),
        ([STOP], {"stop_token_ids": [STOP], "max_new_tokens": 1}, [STOP], FinishReason.STOP_WORDS),
        ([END, 10], {"end_id": END, "min_new_tokens": 5}, [END], FinishReason.END_ID),
        ([10, 11], {"max_new_tokens": 2, "min_new_tokens": 500}, [10, 11], FinishReason.LENGTH),
        ([10, 11, 12], {"stop_words": [[10, 11]]}, [10, 11], FinishReason.STOP_WORDS),
        ([10, 11, 12], {"stop_words": [[10, 11]], "min_new_tokens": 3}, [10, 11, 12], FinishReason.NOT_FINISHED),
        ([9, 10, 11], {"stop_words": [[10, 11]], "min_new_tokens": 3}, [9, 10, 11], FinishReason.STOP_WORDS),
        ([11], {"stop_words": [[1, 11]]}, [11], FinishReason.NOT_FINISHED),
        ([10, 11], {"stop_words": [[10, 11]], "max_new_tokens": 2}, [10, 11], FinishReason.LENGTH),
    ],
)
def test_tokens_after_a_stop_are_trimmed_and_the_first_of_the_ordered_reasons_counts(
    sampled: list[int], fields: dict[str, object], kept: list[int], reason: FinishReason
) -> None:
    request = Request(0, [1, 1], **{"max_new_tokens": 100, **fields})  # type: ignore[arg-type]
    assert append_until_stop(request, sampled) == (kept, reason)
    assert request.token_ids == [1, 1, *kept]


@pytest.mark.parametrize(
    ("sampled", "fields", "reason"),
    [
        ([10, STOP], {"stop_token_ids": [STOP]}, FinishReason.STOP_WORDS),
        ([10, END], {"end_id": END}, FinishReason.END_ID),
        ([10, 11, 12], {"max_new_tokens": 3}, FinishReason.LENGTH),
        ([9, 10, 11], {"stop_words": [[10, 11]]}, FinishReason.STOP_WORDS),
        ([10, 11, 10, 11], {"stop_words": [[10, 11]], "min_new_tokens": 4}, FinishReason.STOP_WORDS),
    ],
)
def test_a_request_ends_with_the_same_token_when_tokens_come_one_by_one(
    sampled: list[int], fields: dict[str, object], reason: FinishReason
) -> None:
    harness = Harness()
    request = harness.add(0, 10, **{"max_new_tokens": 100, **fields})  # type: ignore[arg-type]
    for token in sampled:
        assert not request.is_finished
        [progress] = harness.manager.update(harness.manager.schedule(), [[token]])
        assert progress.new_token_ids == [token]
    assert request.finish_reason is progress.finish_reason is reason
    assert request.token_ids[10:] == sampled
    assert not harness.manager.has_work


@pytest.mark.parametrize(
    ("drafts", "outputs", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], (1, 3, 3, [1, 1, 1])),
        ([[1, 2, 3]], [[1, 5]], (1, 3, 1, [1, 0, 0])),
        ([[]], [[5]], (0, 0, 0, [])),
        ([[1, 2], [3]], [[1, 2, 5], [6]], (2, 3, 2, [1, 1])),
        ([[1, 2], [1, 2, 3]], [[7], [1, 2, 4]], (2, 5, 2, [1, 1, 0])),
    ],
)
def test_accepted_drafts_are_counted_by_their_position(
    drafts: Sequence[list[int]], outputs: Sequence[list[int]], expected: tuple[int, int, int, list[int]]
) -> None:
    harness = Harness()
    requests = [harness.add(request_id, 10, 50) for request_id in range(len(drafts))]
    harness.step()
    for request, tokens in zip(requests, drafts, strict=True):
        request.draft_token_ids = list(tokens)
    harness.manager.update(harness.manager.schedule(), outputs)
    stats = harness.manager.speculation
    assert (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_accepted_per_position,
    ) == expected
    for request, tokens in zip(requests, outputs, strict=True):
        assert request.token_ids[11:] == tokens
        assert request.num_computed_tokens == len(request.token_ids) - 1


def test_a_longer_draft_extends_the_counts_by_position() -> None:
    stats = SpeculationStats()
    stats.observe(1, 1)
    stats.observe(3, 2)
    assert stats.num_accepted_per_position == [2, 1, 0]


@pytest.mark.parametrize(
    ("sampled", "problem"),
    [
        ([[5]], "has 2 requests, but tokens came for 1"),
        ([[5], []], "0 tokens came for request 1, expected 1"),
        ([[5, 6], [7]], "2 tokens came for request 0, expected 1"),
    ],
)
def test_tokens_that_do_not_fit_the_plan_are_refused_and_change_nothing(sampled: list[list[int]], problem: str) -> None:
    harness = Harness()
    requests = [harness.add(0, 10, 5), harness.add(1, 10, 5)]
    plan = harness.manager.schedule()
    with pytest.raises(InvalidSampledTokensError, match=problem):
        harness.manager.update(plan, sampled)
    assert [request.num_generated_tokens for request in requests] == [0, 0]
    harness.finish(plan)
    assert [request.num_generated_tokens for request in requests] == [1, 1]


def test_more_tokens_than_drafts_and_one_are_refused() -> None:
    harness = Harness()
    request = harness.add(0, 10, 50)
    harness.step()
    request.draft_token_ids = [1, 2]
    plan = harness.manager.schedule()
    with pytest.raises(InvalidSampledTokensError, match="4 tokens came for request 0, expected 1 to 3"):
        harness.manager.update(plan, [[1, 2, 3, 4]])


def test_drafts_never_reach_beyond_the_last_token() -> None:
    harness = Harness()
    request = harness.add(0, 10, 4)
    harness.step()
    request.draft_token_ids = [1, 2, 3, 4, 5]
    [entry] = harness.manager.schedule().scheduled
    assert entry.num_draft_tokens == 2


def test_drafts_are_not_scheduled_with_a_chunk_that_is_not_the_last() -> None:
    harness = Harness(max_num_tokens=8)
    request = harness.add(0, 20, 50)
    request.draft_token_ids = [1, 2]
    entries = []
    for tokens in ([], [], [1, 2, 3]):
        plan = harness.manager.schedule()
        entries += plan.scheduled
        harness.manager.update(plan, [tokens])
    assert [entry.num_draft_tokens for entry in entries] == [0, 0, 2]
    assert [entry.num_scheduled_tokens for entry in entries] == [8, 8, 6]


def test_drafts_take_free_blocks_but_nobody_is_paused_for_them() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION)
    requests = [harness.add(request_id, 26, 50) for request_id in range(2)]
    drafted = []
    while not any(plan_request.num_pauses for plan_request in requests):
        for request in requests:
            request.draft_token_ids = [1] * 9
        plan = harness.manager.schedule()
        drafted.append([entry.num_draft_tokens for entry in plan.scheduled])
        harness.manager.update(plan, [[5] if entry.samples else [] for entry in plan.scheduled])
    assert [9, 9] in drafted
    assert len(requests[1].token_ids) == 51, "as without drafts: both run until each needs a sixth block"


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([(), (0,), (0, 1)]),
    st.sampled_from([(), ((2,),), ((2, 3), (4,))]),
    st.integers(0, 6),
)
def test_tokens_that_come_together_are_kept_as_if_they_came_one_by_one(
    tokens: list[int],
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...],
    min_new_tokens: int,
) -> None:
    together, alone = (
        Request(
            index,
            [1],
            max_new_tokens,
            stop_token_ids=stop_ids,
            stop_words=stop_words,
            min_new_tokens=min_new_tokens,
        )
        for index in range(2)
    )
    kept, reason = append_until_stop(together, tokens)
    expected = FinishReason.NOT_FINISHED
    for token in tokens:
        alone.token_ids.append(token)
        expected = check_stop(alone)
        if expected is not FinishReason.NOT_FINISHED:
            break
    assert (together.token_ids, kept, reason) == (alone.token_ids, alone.token_ids[1:], expected)
