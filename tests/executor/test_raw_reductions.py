"""Reductions that OpenVINO computes against their definition in numpy, and group maxima kept up to date."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor.api.sampling_config import SamplingConfig
from executor.sampling import SampledRows, Sampler, SamplingSpec
from executor.sampling.edits import EditNotes
from executor.sampling.raw_reductions import RawReducer
from executor.sampling.row_passes import Maxima, RowPasses

VOCAB = 9001
"""Three members in most groups of maxima, two in the others."""


def reduce(reducer: RawReducer, logits: NDArray[np.float32]) -> tuple[Maxima, NDArray[np.float64]]:
    maxima, normalizers = reducer.reduce(logits)
    return Maxima(maxima.fine.copy(), maxima.coarse), normalizers


def log_sum_exp(row: NDArray[np.float32]) -> float:
    wide = row.astype(np.float64)
    return float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))


@pytest.mark.parametrize("vocab", [1, 23, 700, 4096, VOCAB, 50_257])
def test_maxima_and_normalizers_are_those_of_the_definition(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    logits = (generator.standard_normal((6, vocab)) * 3).astype(np.float32)
    logits[1] *= 200  # exponentials leave the range of float32, both ways
    logits[2] -= 500
    logits[3, 1:] = -np.inf
    logits[4, vocab // 2 :] = np.finfo(np.float32).min
    logits[4, 0] = 1
    passes = RowPasses(vocab)
    maxima, normalizers = reduce(RawReducer(passes), logits)
    expected = passes.maxima(logits, np.arange(6))
    # The lowest number stands for -inf: neither has a probability.
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(maxima.fine, np.where(expected.fine == lowest, -np.inf, expected.fine))
    np.testing.assert_array_equal(maxima.coarse, np.where(expected.coarse == lowest, -np.inf, expected.coarse))
    np.testing.assert_allclose(normalizers, [log_sum_exp(row) for row in logits], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_has_no_finite_normalizer_and_others_have(bad: float) -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, 4321] = bad
    logits[2] = -np.inf
    _, normalizers = reduce(RawReducer(RowPasses(VOCAB)), logits)
    assert np.isfinite(normalizers).tolist() == [True, False, False, True]


def test_reductions_of_a_row_are_bit_equal_in_any_number_of_rows() -> None:
    logits = (np.random.default_rng(5).standard_normal((70, VOCAB)) * 3).astype(np.float32)
    reducer = RawReducer(RowPasses(VOCAB))
    maxima, normalizers = reduce(reducer, logits)
    for begin, end in ((0, 1), (5, 6), (3, 5), (10, 13), (7, 12), (60, 68), (1, 34), (2, 66)):
        some, of_some = reduce(reducer, logits[begin:end])
        np.testing.assert_array_equal(some.fine, maxima.fine[begin:end])
        np.testing.assert_array_equal(of_some, normalizers[begin:end])


def test_the_number_of_threads_changes_no_bit() -> None:
    logits = (np.random.default_rng(6).standard_normal((33, VOCAB)) * 3).astype(np.float32)
    _, one = reduce(RawReducer(RowPasses(VOCAB), 1), logits)
    _, two = reduce(RawReducer(RowPasses(VOCAB), 2), logits)
    np.testing.assert_array_equal(one, two)


@given(data=st.data(), seed=st.integers(0, 10**6), vocab=st.sampled_from([30, 4096, 5000, VOCAB]))
@settings(max_examples=60, deadline=None)
def test_maxima_kept_up_to_date_are_those_of_the_edited_rows(data: st.DataObject, seed: int, vocab: int) -> None:
    """Edits lie in all rows, known are those of a run of them; tokens that hold a group's maximum are edited often."""
    generator = np.random.default_rng(seed)
    rows = data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    logits = generator.integers(-4, 5, (rows, vocab)).astype(np.float32)
    passes = RowPasses(vocab)
    fine = passes.maxima(logits, np.arange(first, end)).fine
    notes = EditNotes(vocab)
    for row in range(rows):
        likely = np.argsort(logits[row])[-(vocab // 3) :]
        count = data.draw(st.integers(0, 20))
        biased = generator.choice(likely, min(count, len(likely)), replace=False)
        notes.add(row, biased, generator.integers(-9, 10, len(biased)).astype(np.float32))
        penalized = np.unique(np.append(biased[: len(biased) // 2], generator.integers(0, vocab, count)))
        counts = generator.integers(0, 3, len(penalized))
        notes.penalize(row, penalized, counts, data.draw(st.sampled_from([(1.5, 1.0, 0.5), (0.5, -2.0, -1.0)])))
        notes.ban(row, generator.integers(0, vocab, count).tolist())
    edits = notes.arrange()
    edits.apply(logits)
    edits.refresh(logits, fine, first)
    np.testing.assert_array_equal(fine, passes.maxima(logits, np.arange(first, end)).fine)


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": -2.0, "bias": 30},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 1.5, "top_k": 7, "bad_words": [[3], [5, 6]]},
    {"temperature": 1.0, "top_k": 20, "bias": VOCAB},
    {"temperature": 1.0, "repetition_penalty": 2.0},
    {"repetition_penalty": 1.3},
]


def test_asking_for_log_probs_changes_no_token() -> None:
    """With log probs the draws rest on OpenVINO's maxima, brought up to date; without, on numpy's."""
    generator = np.random.default_rng(1)
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    plain, reporting, mixed = Sampler(VOCAB), Sampler(VOCAB), Sampler(VOCAB)
    sequences: list[SampledRows] = []
    row = 0
    for index in range(30):
        fields = dict(FIELDS[index % len(FIELDS)])
        bias = np.zeros(VOCAB, np.float32)
        changed = generator.choice(VOCAB, fields.pop("bias", 0), replace=False)
        bias[changed] = generator.standard_normal(len(changed)) * 3
        prompt = generator.integers(0, VOCAB, 300).tolist()
        spec = SamplingSpec(
            config=SamplingConfig(**{name: value for name, value in fields.items() if name in names}, seed=index),
            prompt_token_ids=prompt,
            embedding_bias=bias if len(changed) else None,
            **{name: value for name, value in fields.items() if name not in names},
        )
        reports = dataclasses.replace(spec, return_log_probs=True, num_top_log_probs=index % 4)
        plain.open(index, spec)
        reporting.open(index, reports)
        mixed.open(index, reports if index % 3 == 1 else spec)
        drafts = generator.integers(0, VOCAB, index % 3).tolist()
        sequences.append(SampledRows(index, prompt, drafts, row, 1 + len(drafts)))
        row += 1 + len(drafts)
    logits = (generator.standard_normal((row, VOCAB)) * 2).astype(np.float32)
    logits[:, 8000:] = -np.inf
    expected = [result.token_ids for result in plain.sample(logits.copy(), sequences)]
    for sampler in (reporting, mixed):
        assert [result.token_ids for result in sampler.sample(logits.copy(), sequences)] == expected
