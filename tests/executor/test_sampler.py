"""The sampler against its plain definition, and what a seed promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor.api.errors import InvalidRequestError
from executor.api.sampling_config import SamplingConfig
from executor.sampling import InvalidLogitsError, NoTokenLeftError, SampledRows, Sampler, SamplingSpec
from tests.executor.sampling_reference import edited_logits, log_probabilities, probabilities

VOCAB = 23


def spec(*, prompt: Sequence[int] = (), **fields: Any) -> SamplingSpec:
    """A `SamplingSpec`; fields of `SamplingConfig` are told apart by their names."""
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    config = SamplingConfig(**{name: value for name, value in fields.items() if name in names})
    rest = {name: value for name, value in fields.items() if name not in names}
    return SamplingSpec(config=config, prompt_token_ids=prompt, **rest)


def random_logits(seed: int, rows: int, vocab: int = VOCAB, scale: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def one_token(sampling: SamplingSpec, logits: NDArray[np.float32], token_ids: list[int]) -> int:
    sampler = Sampler(logits.shape[-1])
    sampler.open(0, sampling)
    [result] = sampler.sample(logits.reshape(1, -1).copy(), [SampledRows(0, token_ids, [], 0, 1)])
    assert result.error is None
    [token_id] = result.token_ids
    return token_id


token = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


configs = st.builds(
    SamplingConfig,
    temperature=maybe(st.sampled_from([0.0, 0.3, 0.9, 1.0, 2.5])),
    top_k=maybe(st.sampled_from([0, 1, 2, 5, 22, 100])),
    top_p=maybe(st.sampled_from([0.0, 0.1, 0.6, 0.97, 1.0])),
    min_p=maybe(st.sampled_from([0.0, 0.05, 0.5])),
    top_p_decay=maybe(st.sampled_from([0.5, 0.9, 1.0])),
    top_p_min=maybe(st.sampled_from([0.2, 0.99])),
    top_p_reset_ids=maybe(token),
    repetition_penalty=maybe(st.sampled_from([0.7, 1.0, 1.3])),
    presence_penalty=maybe(st.sampled_from([-0.5, 0.0, 0.8])),
    frequency_penalty=maybe(st.sampled_from([-0.3, 0.0, 0.4])),
    prompt_ignore_length=maybe(st.integers(0, 5)),
    no_repeat_ngram_size=maybe(st.integers(1, 4)),
    min_tokens=maybe(st.integers(0, 4)),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[SamplingSpec, list[int], list[int]]:
    """A spec, the tokens so far, and drafts."""
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    bias = draw(maybe(st.sampled_from([0.0, 0.02, 0.9])))
    embedding_bias = None
    if bias is not None:
        generator = np.random.default_rng(draw(st.integers(0, 99)))
        embedding_bias = (generator.standard_normal(VOCAB) * (generator.random(VOCAB) < bias)).astype(np.float32)
    sampling = SamplingSpec(
        config=draw(configs),
        prompt_token_ids=prompt,
        end_id=draw(maybe(token)),
        stop_token_ids=draw(st.lists(token, max_size=2)),
        stop_words=draw(words),
        bad_words=draw(words),
        embedding_bias=embedding_bias,
        sequence_index=draw(st.integers(0, 3)),
        return_log_probs=draw(st.booleans()),
        num_top_log_probs=draw(st.integers(0, 4)),
        return_generation_logits=draw(st.booleans()),
    )
    generated = draw(st.lists(token, max_size=6))
    return sampling, prompt + generated, draw(st.lists(token, max_size=3))


@given(batch=st.lists(sequences(), min_size=1, max_size=6), seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_any_mix_of_options_in_one_batch_draws_from_each_rows_own_distribution(
    batch: list[tuple[SamplingSpec, list[int], list[int]]], seed: int
) -> None:
    """Each drawn token has a positive probability by the plain definition, drafts are accepted exactly while the
    drawn tokens equal them, and what is reported is about the raw logits."""
    rows = sum(1 + len(drafts) for _, _, drafts in batch)
    raw = random_logits(seed, rows)
    sampler = Sampler(VOCAB)
    sampled_rows = []
    row = 0
    for request_id, (sampling, token_ids, drafts) in enumerate(batch):
        sampler.open(request_id, sampling)
        sampled_rows.append(SampledRows(request_id, token_ids, drafts, row, 1 + len(drafts)))
        row += 1 + len(drafts)
    results = sampler.sample(raw.copy(), sampled_rows)

    for (sampling, token_ids, drafts), where, result in zip(batch, sampled_rows, results, strict=True):
        for step, token_id in enumerate(result.token_ids):
            assert result.token_ids[:step] == drafts[:step]
            before = token_ids + drafts[:step]
            logits = raw[where.first_row + step]
            assert probabilities(logits, sampling, before)[token_id] > 0
            expected = log_probabilities(logits)
            if sampling.return_log_probs or sampling.num_top_log_probs:
                assert result.log_probs is not None
                assert result.top_log_probs is not None
                assert math.isclose(result.log_probs[step], expected[token_id], abs_tol=1e-5)
                top = result.top_log_probs[step]
                order = np.lexsort((np.arange(VOCAB), -logits))[: sampling.num_top_log_probs]
                assert [token_id for token_id, _ in top] == order.tolist()
                assert np.allclose([log_prob for _, log_prob in top], expected[order], atol=1e-5)
            else:
                assert result.log_probs is None
        count = len(result.token_ids)
        if sampling.return_generation_logits:
            assert result.generation_logits is not None
            assert np.array_equal(result.generation_logits, raw[where.first_row : where.first_row + count])
        if result.error is None:
            ends = {*sampling.stop_token_ids, sampling.end_id}
            last = result.token_ids[-1]
            assert count == 1 + len(drafts) or last != drafts[count - 1] or last in ends
        else:
            left = edited_logits(raw[where.first_row + count], sampling, token_ids + drafts[:count])
            assert isinstance(result.error, NoTokenLeftError)
            assert not np.isfinite(left).any()


@given(batch=st.lists(sequences(), min_size=2, max_size=6), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_a_seed_gives_the_same_tokens_alone_as_in_any_batch(
    batch: list[tuple[SamplingSpec, list[int], list[int]]], seed: int
) -> None:
    rows = sum(1 + len(drafts) for _, _, drafts in batch)
    raw = random_logits(seed, rows).round(1)  # equal logits on purpose
    together = Sampler(VOCAB)
    sampled_rows = []
    row = 0
    for request_id, (sampling, token_ids, drafts) in enumerate(batch):
        together.open(request_id, sampling)
        sampled_rows.append(SampledRows(request_id, token_ids, drafts, row, 1 + len(drafts)))
        row += 1 + len(drafts)
    results = together.sample(raw.copy(), sampled_rows)
    for where, (sampling, token_ids, drafts), result in zip(sampled_rows, batch, results, strict=True):
        alone = Sampler(VOCAB)
        alone.open(7, sampling)
        own = raw[where.first_row : where.first_row + where.num_rows].copy()
        [expected] = alone.sample(own, [SampledRows(7, token_ids, drafts, 0, where.num_rows)])
        assert result.token_ids == expected.token_ids
        assert result.log_probs == expected.log_probs
        assert result.top_log_probs == expected.top_log_probs


@given(sequence=sequences(), seed=st.integers(0, 10**6), wrong=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_tokens_and_log_probs_are_the_same_with_and_without_speculation_and_after_a_pause(
    sequence: tuple[SamplingSpec, list[int], list[int]], seed: int, wrong: int
) -> None:
    """The logits are a function of position, as a model's are of its context. Drafts are right up to `wrong`."""
    sampling, token_ids, _ = sequence
    table = random_logits(seed, 20)

    plain = Sampler(VOCAB)
    plain.open(0, sampling)
    tokens = list(token_ids)
    log_probs: list[float] = []
    for step in range(6):
        [result] = plain.sample(table[step : step + 1].copy(), [SampledRows(0, tokens, [], 0, 1)])
        if result.error is not None:
            break
        tokens = tokens + result.token_ids
        log_probs += result.log_probs or []
        if step == 2:  # a pause: the sampler forgets the sequence and is told of it again
            plain.close(0)
            plain.open(0, sampling)
    generated = tokens[len(token_ids) :]

    drafts = [(token_id + (place >= wrong)) % VOCAB for place, token_id in enumerate(generated[:-1])]
    speculating = Sampler(VOCAB)
    speculating.open(0, sampling)
    [result] = speculating.sample(
        table[: 1 + len(drafts)].copy(), [SampledRows(0, token_ids, drafts, 0, 1 + len(drafts))]
    )
    assert result.token_ids == generated[: len(result.token_ids)]
    ends = {*sampling.stop_token_ids, sampling.end_id}
    expected = next((place for place, draft in enumerate(drafts[:wrong]) if draft in ends), min(wrong, len(drafts)))
    assert len(result.token_ids) == expected + 1 or not generated
    assert (result.log_probs or []) == log_probs[: len(result.token_ids)]


def chi_square_limit(degrees: int) -> float:
    """A value that a right sampler exceeds less than once in ten thousand times (Wilson and Hilferty's formula)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7, "temperature": 1.3},
        {"top_p": 0.97},
        {"top_p": 0.95, "temperature": 2.0},
        {"min_p": 0.03, "temperature": 1.5},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
        {"temperature": 1.2, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 1.0, "bad_words": [[1], [2, 3]], "end_id": 0, "min_tokens": 9},
        {"temperature": 1.0, "embedding_bias": np.linspace(-2, 2, 17, dtype=np.float32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [23, 5000])
def test_draws_follow_the_distribution_that_float64_gives(fields: dict[str, Any], vocab: int) -> None:
    """4,000 sequences of one seed draw from one distribution; chi-square against the plain definition."""
    prompt = [1, 2, 2, 5, 9, 2]
    if "embedding_bias" in fields:
        fields = fields | {"embedding_bias": np.resize(fields["embedding_bias"], vocab)}
    sampling = spec(prompt=prompt, seed=11, **fields)
    logits = random_logits(3, 1, vocab, scale=1.5)[0]
    sequences = 4000
    sampler = Sampler(vocab)
    for index in range(sequences):
        sampler.open(index, dataclasses.replace(sampling, sequence_index=index))
    counts = np.zeros(vocab)
    for begin in range(0, sequences, 500):
        rows = [SampledRows(begin + row, prompt, [], row, 1) for row in range(500)]
        results = sampler.sample(np.tile(logits, (500, 1)), rows)
        counts += np.bincount([result.token_ids[0] for result in results], minlength=vocab)
    expected = probabilities(logits, sampling, prompt) * sequences

    assert counts[expected == 0].sum() == 0
    # Rare tokens share bins, so that each bin expects enough draws for the test to hold.
    order = np.argsort(-expected)
    _, bins = np.unique(np.cumsum(expected[order]) // 20, return_inverse=True)
    observed = np.bincount(bins, weights=counts[order])
    wanted = np.bincount(bins, weights=expected[order])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert len(wanted) > 2
    assert statistic < chi_square_limit(len(wanted) - 1)


def test_draws_at_successive_positions_are_independent() -> None:
    """Pairs of neighbouring draws of a fair coin, and their runs, as often as chance has them."""
    sampling = spec(temperature=1.0, seed=5)
    sampler = Sampler(2)
    sampler.open(0, sampling)
    tokens: list[int] = []
    for _ in range(3000):
        [result] = sampler.sample(np.zeros((1, 2), np.float32), [SampledRows(0, tokens, [], 0, 1)])
        tokens = tokens + result.token_ids
    bits = np.array(tokens)
    pairs = np.bincount(bits[:-1] * 2 + bits[1:], minlength=4)
    assert ((pairs - 750) ** 2 / 750).sum() < chi_square_limit(3)


def test_sequences_of_one_seed_draw_independently() -> None:
    logits = np.zeros((1, 2), np.float32)
    draws = np.array(
        [
            [one_token(spec(temperature=1.0, seed=seed, sequence_index=index), logits, []) for index in range(2)]
            for seed in range(600)
        ]
    )
    pairs = np.bincount(draws[:, 0] * 2 + draws[:, 1], minlength=4)
    assert ((pairs - 150) ** 2 / 150).sum() < chi_square_limit(3)


def test_without_a_seed_two_requests_differ() -> None:
    logits = np.zeros((1, 100_003), np.float32)
    assert one_token(spec(temperature=1.0), logits, []) != one_token(spec(temperature=1.0), logits, [])


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.99, "min_p": 0.1}, {"top_k": 4000}, {"top_k": 4000, "top_p": 0.9}],
)
def test_filters_that_keep_thousands_of_tokens_keep_the_right_ones(fields: dict[str, Any]) -> None:
    """The nucleus is wider than what is looked at first."""
    vocab = 5000
    logits = random_logits(0, 1, vocab, scale=0.5)
    sampling = spec(temperature=1.0, **fields)
    kept = probabilities(logits[0], sampling, []) > 0
    assert 500 < kept.sum() < vocab
    least = np.flatnonzero(kept)[np.argmin(logits[0][kept])]
    seen = set()
    for seed in range(100):
        seen.add(one_token(dataclasses.replace(sampling, sequence_index=seed), logits, []))
    assert kept[sorted(seen)].all()
    # Only the least likely token that is kept, and those that are not, are left to draw from.
    narrow = logits.copy()
    narrow[0, least] += 50
    assert one_token(sampling, narrow, []) == least


def test_all_draws_of_equal_logits_depend_on_the_row_alone() -> None:
    """bf16 logits are often equal. What top-k keeps of equals goes by token id, whatever the other rows ask for."""
    logits = np.zeros((2, 4096), np.float32)
    for other in (1, 3, 700):
        sampler = Sampler(4096)
        sampler.open(0, spec(temperature=1.0, top_k=3, seed=1))
        sampler.open(1, spec(temperature=1.0, top_k=other, seed=2))
        results = sampler.sample(logits.copy(), [SampledRows(i, [], [], i, 1) for i in (0, 1)])
        assert results[0].token_ids[0] < 3
        assert results[1].token_ids[0] < other


def test_a_closed_slot_leaves_nothing_to_its_next_owner() -> None:
    """Random options, then none in the same slot: as in a fresh sampler."""
    everything = spec(
        prompt=[1, 2, 3],
        temperature=0.7,
        top_k=3,
        top_p=0.5,
        top_p_decay=0.9,
        min_p=0.2,
        repetition_penalty=1.4,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        no_repeat_ngram_size=1,
        min_tokens=50,
        end_id=4,
        bad_words=[[5], [6, 7]],
        embedding_bias=np.full(VOCAB, 3.0, np.float32),
        num_top_log_probs=2,
        return_generation_logits=True,
        seed=9,
    )
    sampler = Sampler(VOCAB)
    logits = random_logits(1, 1)
    for plain in (spec(), spec(temperature=1.0, seed=3)):
        sampler.open(0, everything)
        sampler.sample(logits.copy(), [SampledRows(0, [1, 2, 3, 4], [], 0, 1)])
        sampler.close(0)
        sampler.open(0, plain)
        [result] = sampler.sample(logits.copy(), [SampledRows(0, [1, 2, 3, 4], [], 0, 1)])
        assert result.token_ids == [one_token(plain, logits, [1, 2, 3, 4])]
        assert result.log_probs is None
        assert result.generation_logits is None
        sampler.close(0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.9}, {"bad_words": [[3]]}])
def test_logits_that_are_not_numbers_end_only_their_own_request(bad: float, fields: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB)
    for request_id in range(3):
        sampler.open(request_id, spec(seed=1, num_top_log_probs=1, **fields))
    logits = random_logits(0, 3)
    logits[1, 5] = bad
    rows = [SampledRows(request_id, [1], [], request_id, 1) for request_id in range(3)]
    results = sampler.sample(logits.copy(), rows)
    assert isinstance(results[1].error, InvalidLogitsError)
    assert results[1].token_ids == []
    for request_id in (0, 2):
        assert results[request_id].error is None
        assert results[request_id].token_ids == [one_token(spec(seed=1, **fields), logits[request_id], [1])]


def test_a_bad_row_behind_a_rejected_draft_does_no_harm() -> None:
    sampler = Sampler(VOCAB)
    sampler.open(0, spec())
    logits = random_logits(0, 2)
    logits[1] = np.nan
    best = int(logits[0].argmax())
    [rejected] = sampler.sample(logits.copy(), [SampledRows(0, [1], [(best + 1) % VOCAB], 0, 2)])
    assert (rejected.token_ids, rejected.error) == ([best], None)
    [accepted] = sampler.sample(logits.copy(), [SampledRows(0, [1], [best], 0, 2)])
    assert accepted.token_ids == [best]
    assert isinstance(accepted.error, InvalidLogitsError)


def test_options_that_leave_no_token_say_so() -> None:
    sampler = Sampler(3)
    sampler.open(0, spec(bad_words=[[0], [1]], end_id=2, min_tokens=5))
    [result] = sampler.sample(np.zeros((1, 3), np.float32), [SampledRows(0, [0], [], 0, 1)])
    assert isinstance(result.error, NoTokenLeftError)
    assert "minimum length" in result.error.message


def test_log_probs_stay_finite_and_right_for_extreme_logits() -> None:
    logits = np.full((1, VOCAB), -1e30, np.float32)
    logits[0, :2] = [1e4, 1e4]
    sampler = Sampler(VOCAB)
    sampler.open(0, spec(num_top_log_probs=3))
    [result] = sampler.sample(logits.copy(), [SampledRows(0, [1], [], 0, 1)])
    assert result.log_probs == pytest.approx([math.log(0.5)], abs=1e-6)
    assert result.top_log_probs is not None
    assert result.top_log_probs[0][2] == (2, pytest.approx(-1e30, rel=1e-6))


def test_impossible_tokens_are_not_among_the_most_likely() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [3, 7]] = [1.0, 2.0]
    sampler = Sampler(VOCAB)
    sampler.open(0, spec(num_top_log_probs=5, temperature=1.0, top_k=5))
    [result] = sampler.sample(logits.copy(), [SampledRows(0, [1], [], 0, 1)])
    assert result.top_log_probs is not None
    assert [token_id for token_id, _ in result.top_log_probs[0]] == [7, 3]


def test_sharing_rows_out_to_threads_changes_nothing() -> None:
    """Enough logits for four threads; every row's draw and log probability is bit-equal to those without threads."""
    vocab, rows = 20_000, 90
    logits = random_logits(4, rows, vocab)
    results = []
    for num_threads in (1, 4):
        sampler = Sampler(vocab, num_threads=num_threads)
        for row in range(rows):
            filters = {"top_p": 0.9} if row % 3 else {}
            sampler.open(row, spec(temperature=1.0 + row % 2, seed=row, num_top_log_probs=3, **filters))
        results.append(sampler.sample(logits.copy(), [SampledRows(row, [1], [], row, 1) for row in range(rows)]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"end_id": VOCAB}, "end_id"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_words": [[1, VOCAB]]}, "bad_words"),
        ({"stop_words": [[]]}, "stop_words"),
        ({"prompt": [0, 99]}, "prompt_token_ids"),
        ({"embedding_bias": np.zeros(3, np.float32)}, "embedding_bias"),
        ({"embedding_bias": np.full(VOCAB, np.nan, np.float32)}, "embedding_bias"),
        ({"top_p": 2.0}, "sampling_config.top_p"),
        ({"top_p_reset_ids": VOCAB}, "sampling_config.top_p_reset_ids"),
        ({"num_top_log_probs": -1}, "num_top_log_probs"),
        ({"sequence_index": -1}, "sequence_index"),
        ({"logits_processors": [lambda _: None]}, "logits_post_processor"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampler(VOCAB).open(0, spec(**fields))
    assert caught.value.field == field


def test_rows_that_do_not_fit_the_logits_are_refused() -> None:
    sampler = Sampler(VOCAB)
    sampler.open(0, spec())
    logits = random_logits(0, 2)
    with pytest.raises(ValueError, match="needs one row more than drafts"):
        sampler.sample(logits, [SampledRows(0, [1], [2], 0, 1)])
    with pytest.raises(ValueError, match="rows 1 to 3 of 2"):
        sampler.sample(logits, [SampledRows(0, [1], [2], 1, 2)])
    with pytest.raises(ValueError, match="must be float32"):
        sampler.sample(logits.astype(np.float64), [SampledRows(0, [1], [], 0, 1)])
    with pytest.raises(KeyError):
        sampler.sample(logits, [SampledRows(5, [1], [], 0, 1)])
    with pytest.raises(ValueError, match="open already"):
        sampler.open(0, spec())
    sampler.close(99)
