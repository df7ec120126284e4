"""Prompt lookup: what is proposed, how long, and when not at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.api.errors import InvalidRequestError
from executor.api.request import LookaheadDecodingConfig
from executor.speculation import Drafter, NgramIndex, StepCost, max_draft_tokens

tokens = st.lists(st.integers(0, 3), max_size=40)


def longest_match(token_ids: list[int], max_size: int) -> tuple[int, int] | None:
    """The definition, plainly: longest end of the sequence that occurred before, latest occurrence."""
    length = len(token_ids)
    for size in range(min(max_size, length), 0, -1):
        for end in range(length - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[length - size :]:
                return size, end
    return None


@given(token_ids=tokens, size=st.integers(1, 5), cuts=st.lists(st.integers(0, 40)))
def test_the_index_finds_a_match_at_least_as_long_as_any_ngrams_however_tokens_come(
    token_ids: list[int], size: int, cuts: list[int]
) -> None:
    index = NgramIndex(size)
    done = 0
    for cut in [*sorted(cuts), len(token_ids)]:
        index.extend(token_ids[done:cut])
        done = max(done, min(cut, len(token_ids)))
        plain = longest_match(token_ids[:done], size)
        match = index.match()
        assert (match is None) == (plain is None)
        if match is not None and plain is not None:
            length, continuation = match
            assert length >= plain[0]
            assert token_ids[continuation - length : continuation] == token_ids[done - length : done]
            assert continuation < done


def test_a_match_is_followed_past_a_later_occurrence_of_its_last_tokens() -> None:
    index = NgramIndex(2)
    index.extend([1, 2, 3, 4, 5, 9, 3, 4, 6, 9, 1, 2, 3, 4])
    assert index.match() == (4, 4)


def test_a_continuation_goes_on_past_the_end_as_if_the_text_repeated_itself() -> None:
    index = NgramIndex(3)
    index.extend([7, 8, 9, 7, 8, 9, 7])
    assert index.match() == (4, 4)
    assert index.continuation(4, 7) == [8, 9, 7, 8, 9, 7, 8]


def drive(
    drafter: Drafter, prompt: list[int], truth: list[int], *, num_sequences: int = 1, budget: int | None = None
) -> tuple[int, int]:
    """Generate `truth` after `prompt` with greedy verification; returns steps and verified drafts. `budget` caps the
    drafts that a step verifies, as a token budget would."""
    token_ids = list(prompt)
    steps = drafts_verified = 0
    while len(token_ids) < len(prompt) + len(truth):
        rest = truth[len(token_ids) - len(prompt) :]
        drafts = drafter.propose(0, token_ids, num_sequences=num_sequences)[:budget]
        accepted = 0
        while accepted < min(len(drafts), len(rest) - 1) and drafts[accepted] == rest[accepted]:
            accepted += 1
        token_ids += rest[: accepted + 1]
        steps += 1
        drafts_verified += len(drafts)
    return steps, drafts_verified


def cost(steps: int, drafts: int) -> float:
    """In decode steps at batch 1: a row costs a seventeenth of a step of one row on the CPU engine."""
    return steps + drafts / 17


def test_copied_text_takes_a_fraction_of_the_steps() -> None:
    generator = random.Random(1)
    quoted = [generator.randrange(1000) for _ in range(200)]
    steps, drafts = drive(Drafter(LookaheadDecodingConfig()), [*quoted, 5000, *quoted[:3]], quoted[3:])
    assert cost(steps, drafts) < 197 / 4


@pytest.mark.parametrize("vocab", [5, 30, 400, 10_000])
def test_drafting_never_costs_a_twentieth_on_text_that_does_not_repeat(vocab: int) -> None:
    """Random text: every match is a coincidence, more of them the fewer tokens there are."""
    generator = random.Random(vocab)
    prompt = [generator.randrange(vocab) for _ in range(300)]
    truth = [generator.randrange(vocab) for _ in range(400)]
    steps, drafts = drive(Drafter(LookaheadDecodingConfig()), prompt, truth)
    assert cost(steps, drafts) < 400 / 0.95


@pytest.mark.parametrize("rows_of_change", [0, 5, 10])
@pytest.mark.parametrize("vocab", [12, 60])
def test_drafting_costs_little_where_another_number_of_rows_does(vocab: int, rows_of_change: int) -> None:
    """Text of few tokens repeats them by chance; steps are padded to 2, 4, 8, ... rows as the CPU engine's are."""
    generator = random.Random(vocab)
    drafter = Drafter(step_cost=StepCost(lambda num_rows: 2 if num_rows < 3 else -(-num_rows // 4) * 4))
    plain = drafted = 0.0
    before = 2
    for request_id in range(6):
        drafter.open(request_id, LookaheadDecodingConfig())
        token_ids = [generator.randrange(vocab) for _ in range(40)]
        for _ in range(64):
            drafts = drafter.propose(request_id, token_ids)
            token_id = generator.randrange(vocab)
            rows = 2 if len(drafts) < 2 else -(-(1 + len(drafts)) // 4) * 4
            cost = 16 + rows + (rows_of_change if rows != before else 0)
            drafter.step_cost.learn(1 + len(drafts), cost * 1e-3)
            # A step whose first drafts are right would have spared as many plain ones; here none is counted.
            drafted += cost
            plain += 16 + 2
            before = rows
            token_ids.append(token_id)
    assert plain / drafted > 0.95


def test_drafts_fill_the_rows_that_the_engine_pads() -> None:
    generator = random.Random(4)
    quoted = [generator.randrange(1000) for _ in range(100)]
    text = [*quoted, 5000, *quoted[:2]]  # a match of two tokens, of which little is known
    padded = Drafter(LookaheadDecodingConfig(), StepCost(lambda num_rows: -(-num_rows // 12) * 12))
    assert len(Drafter(LookaheadDecodingConfig()).propose(0, text)) < len(padded.propose(0, text)) <= 11


def test_where_rows_cost_more_fewer_are_drafted() -> None:
    generator = random.Random(4)
    quoted = [generator.randrange(1000) for _ in range(100)]
    text = [*quoted, 5000, *quoted[:2]]
    counts = [
        len(Drafter(LookaheadDecodingConfig(), StepCost(rows_of_fixed_cost=rows)).propose(0, text))
        for rows in (1, 16, 200)
    ]
    assert counts == sorted(set(counts))


def test_a_large_batch_drafts_only_what_is_nearly_certain() -> None:
    generator = random.Random(2)
    quoted = [generator.randrange(1000) for _ in range(100)]
    alone = Drafter(LookaheadDecodingConfig()).propose(0, [*quoted, 5000, *quoted[:3]])
    crowded = Drafter(LookaheadDecodingConfig()).propose(0, [*quoted, 5000, *quoted[:3]], num_sequences=64)
    assert len(alone) > len(crowded)
    assert len(crowded) <= 1


def test_text_that_begins_to_repeat_is_noticed_again() -> None:
    generator = random.Random(3)
    noise = [generator.randrange(30) for _ in range(600)]
    loop = [generator.randrange(30) for _ in range(20)] * 20
    drafter = Drafter(LookaheadDecodingConfig())
    drive(drafter, noise[:100], noise[100:])
    before = drafter.statistics_of(0).num_accepted_tokens
    steps, _ = drive(drafter, noise, loop)
    assert steps < len(loop) / 2
    assert drafter.statistics_of(0).num_accepted_tokens > before


def test_statistics_count_what_was_proposed_and_what_came_true() -> None:
    drafter = Drafter(LookaheadDecodingConfig(max_window_size=1, max_ngram_size=2, max_verification_set_size=3))
    drafts = drafter.propose(0, [1, 2, 3, 4, 5, 1, 2])
    assert drafts == [3, 4, 5]
    drafter.propose(0, [1, 2, 3, 4, 5, 1, 2, 3, 4, 9])
    statistics = drafter.statistics_of(0)
    assert (statistics.num_draft_tokens, statistics.num_accepted_tokens) == (3, 2)
    assert statistics.acceptance_rate == pytest.approx(2 / 3)
    drafter.close(0)
    assert drafter.statistics.num_accepted_tokens == 2
    assert drafter.statistics_of(0).num_draft_tokens == 0


def test_only_opened_sequences_are_drafted_for_without_a_default() -> None:
    drafter = Drafter()
    repetitive = [1, 2, 3] * 5
    assert drafter.propose(0, repetitive) == []
    drafter.open(1, LookaheadDecodingConfig())
    assert drafter.propose(1, repetitive) != []
    with pytest.raises(ValueError, match="open already"):
        drafter.open(1, LookaheadDecodingConfig())
    drafter.close(1)
    drafter.close(1)
    assert drafter.propose(1, repetitive) == []


def test_sequences_do_not_see_each_other() -> None:
    drafter = Drafter(LookaheadDecodingConfig())
    assert drafter.propose(0, [1, 2, 3, 1, 2])[:1] == [3]
    assert drafter.propose(1, [4, 5, 1, 2]) == []


def test_a_step_verifies_as_many_drafts_as_lookahead_decoding_would() -> None:
    assert max_draft_tokens(LookaheadDecodingConfig()) == 15
    assert max_draft_tokens(LookaheadDecodingConfig(7, 7, 7)) == 83
    nothing = LookaheadDecodingConfig(1, 1, 0)
    assert max_draft_tokens(nothing) == 0
    assert Drafter(nothing).propose(0, [1, 2, 3, 1, 2]) == []


@pytest.mark.parametrize("value", [-1, 2**32 - 1])
@pytest.mark.parametrize("field", ["max_window_size", "max_ngram_size", "max_verification_set_size"])
def test_a_configuration_out_of_range_is_refused_by_name(field: str, value: int) -> None:
    config = LookaheadDecodingConfig()
    setattr(config, field, value)
    with pytest.raises(InvalidRequestError) as caught:
        Drafter().open(0, config)
    assert caught.value.field == f"lookahead_config.{field}"
