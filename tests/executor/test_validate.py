"""Step inputs with one thing wrong each, and that nothing right is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor.engines.interface import EngineSpec, InvalidStepError, StepInputs
from executor.engines.validate import validate_block_ids, validate_step
from tests.executor.hand_fed import Piece, pack

TOKENS_PER_BLOCK = 4
NUM_BLOCKS = 40
SPEC = EngineSpec(
    vocab_size=100,
    num_layers=1,
    num_kv_heads=1,
    head_size=2,
    tokens_per_block=TOKENS_PER_BLOCK,
    max_batch_size=3,
    max_num_tokens=12,
    max_input_len=16,
    max_seq_len=20,
    kv_bytes_per_block=64,
)
GOOD = pack(
    [Piece(range(20), 4, 9, [3, 1, 4]), Piece(range(20), 7, 8, [5, 9]), Piece(range(20), 0, 2, [2])], TOKENS_PER_BLOCK
)


def long(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def short(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": GOOD.input_ids.astype(np.int32)}, "input_ids is int32 .* must be int64"),
        ({"past_lens": GOOD.past_lens[:, None]}, "past_lens is int32 with 2 dimensions"),
        ({"input_ids": long(4, 5, 100, 7, 8, 7, 0, 1)}, r"input_ids\[2\] is 100, not in \[0, 100\)"),
        ({"input_ids": long(4, 5, 6, 7, -1, 7, 0, 1)}, r"input_ids\[4\] is -1"),
        ({"position_ids": long(4, 5, 6, 7, 9, 7, 0, 1)}, r"position_ids\[4\] is 9; .* imply 8"),
        ({"position_ids": long(4, 5)}, "position_ids has 2 entries for 8"),
        ({"past_lens": short(5, 7, 0)}, r"position_ids\[0\] is 4; .* imply 5"),
        ({"past_lens": short(4, -7, 0)}, r"past_lens\[1\] is -7"),
        ({"past_lens": short(4, 7)}, "subsequence_begins has 4 entries; 2 sequences take 3"),
        ({"past_lens": short()}, "0 sequences; the engine takes 1 to 3"),
        ({"subsequence_begins": short(0, 5, 6, 9)}, "subsequence_begins runs from 0 to 9; it must run from 0 to 8"),
        ({"subsequence_begins": short(1, 5, 6, 8)}, "subsequence_begins runs from 1 to 8"),
        ({"subsequence_begins": short(0, 6, 5, 8)}, r"subsequence_begins\[1\] is 6, the next 5"),
        ({"subsequence_begins": short(0, 5, 5, 8)}, r"subsequence_begins\[1\] is 5, the next 5"),
        ({"block_indices": short(3, 1, 40, 5, 9, 2)}, r"block_indices\[2\] is 40, not in \[0, 40\)"),
        ({"block_indices": short(3, 1, 4, -1, 9, 2)}, r"block_indices\[3\] is -1"),
        ({"block_indices": short(3, 1, 3, 5, 9, 2)}, "block 3 twice in the table of sequence 0"),
        ({"block_indices_begins": short(0, 3, 5, 7)}, "block_indices_begins runs from 0 to 7; it must run from 0 to 6"),
        ({"block_indices_begins": short(0, 4, 3, 6)}, r"block_indices_begins\[1\] is 4, the next 3"),
        ({"block_indices_begins": short(0, 2, 5, 6)}, "sequence 0 2 blocks of 4 tokens; its 9 tokens need 3"),
        ({"sampled_rows": long(0, 8)}, r"sampled_rows\[1\] is 8, not in \[0, 8\)"),
        ({"sampled_rows": long(-1)}, r"sampled_rows\[0\] is -1"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(changes: dict[str, NDArray[Any]], message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        validate_step(GOOD._replace(**changes), SPEC, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(range(50), 0, 13, range(4))], "13 rows; the engine takes 1 to 12"),
        ([Piece([1], 0, 1, [block]) for block in range(4)], "4 sequences; the engine takes 1 to 3"),
        ([Piece(range(50), 18, 21, range(6))], r"past_lens\[0\] is 18 .* 3 rows: 21 tokens exceed max_seq_len 20"),
        ([], "0 rows"),
    ],
)
def test_a_step_beyond_the_engines_limits_is_refused_with_both_numbers(pieces: list[Piece], message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        validate_step(pack(pieces, TOKENS_PER_BLOCK), SPEC, NUM_BLOCKS)


def test_block_ids_outside_the_pool_are_refused() -> None:
    validate_block_ids(np.array([0, NUM_BLOCKS - 1]), NUM_BLOCKS)
    with pytest.raises(InvalidStepError, match=r"block_ids\[1\] is 40, not in \[0, 40\)"):
        validate_block_ids(np.array([0, NUM_BLOCKS]), NUM_BLOCKS)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 16), st.integers(1, 4)), min_size=1, max_size=3),
    sampled=st.lists(st.integers(0, 0), max_size=2),
    shared=st.booleans(),
    data=st.data(),
)
def test_whatever_is_within_the_limits_passes(
    sequences: list[tuple[int, int]], sampled: list[int], shared: bool, data: st.DataObject
) -> None:
    """Including two tables that share their first blocks, as after a prefix hit."""
    order = data.draw(st.permutations(range(NUM_BLOCKS)))
    pieces = [
        Piece(range(20), past, past + new, order[0 if shared else 5 * index :][:5])
        for index, (past, new) in enumerate(sequences)
    ]
    inputs: StepInputs = pack(pieces, TOKENS_PER_BLOCK, sampled)
    validate_step(inputs, SPEC, NUM_BLOCKS)
