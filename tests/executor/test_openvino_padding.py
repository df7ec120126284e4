"""Padding of steps: what it may add, and what it must leave alone."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.openvino_padding import pad_step, padded_sizes
from executor.engines.validate import validate_step
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import engine_spec

SCRATCH = 40
SPEC = engine_spec(tiny_config(), tokens_per_block=32)


@given(largest=st.integers(1, 10_000), smallest=st.sampled_from([2, 8]))
def test_a_few_sizes_cover_every_number_of_rows_closely(largest: int, smallest: int) -> None:
    sizes = padded_sizes(largest, smallest)
    assert sizes[0] == smallest
    assert sizes[-1] == max(largest, smallest)
    assert len(sizes) <= 10 + 4 * max(0, largest.bit_length() - 5)
    for size, following in itertools.pairwise(sizes):
        assert size < following <= size + max(4, size / 4)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60)), min_size=1, max_size=6),
    num_samples=st.integers(0, 6),
    smallest=st.sampled_from([2, 8]),
)
def test_a_padded_step_is_the_step_and_one_sequence_in_the_scratch_block(
    pieces: list[tuple[int, int]], num_samples: int, smallest: int
) -> None:
    tokens = list(range(1, 120)) * 2
    blocks = iter(range(SCRATCH))
    step = pack(
        [Piece(tokens, past, past + count, [next(blocks) for _ in range(6)]) for past, count in pieces],
        32,
        range(min(num_samples, sum(count for _, count in pieces))),
    )
    sizes = padded_sizes(512, smallest)
    padded = pad_step(step, sizes, SCRATCH, 32)
    assert len(padded.input_ids) in sizes
    assert len(padded.sampled_rows) in {0, *sizes}
    for name, before in step._asdict().items():
        after = getattr(padded, name)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after[: len(before)], before)
    assert set(padded.block_indices[len(step.block_indices) :]) <= {SCRATCH}
    assert (len(padded.sampled_rows) == 0) == (len(step.sampled_rows) == 0)
    # But for the scratch block being repeated, it is a step like any other.
    added = len(padded.block_indices) - len(step.block_indices)
    distinct = padded.block_indices.copy()
    distinct[len(step.block_indices) :] = SCRATCH + np.arange(added)
    validate_step(padded._replace(block_indices=distinct), SPEC, SCRATCH + max(added, 1))


def test_a_step_of_a_padded_size_is_left_as_it_is() -> None:
    step = pack([Piece(range(12), 0, 12, [0])], 32)
    assert pad_step(step, padded_sizes(64, 2), SCRATCH, 32).input_ids is step.input_ids
