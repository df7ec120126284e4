"""Checks step inputs before an engine sees them: engines crash on some of these mistakes and hide others.

Each check is one vectorised comparison; the culprit is looked up only once a check has failed. 64 sequences take well
under 100 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.engines.interface import EngineSpec, InvalidStepError, StepInputs

_DTYPES: dict[str, type[np.generic]] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "past_lens": np.int32,
    "subsequence_begins": np.int32,
    "block_indices": np.int32,
    "block_indices_begins": np.int32,
    "sampled_rows": np.int64,
}


def validate_step(inputs: StepInputs, spec: EngineSpec, num_blocks: int) -> None:
    """Check every field of a step.

    Args:
        inputs: the step.
        spec: the engine's limits.
        num_blocks: blocks the caller may use.

    Raises:
        InvalidStepError: names the field, where it is wrong, and what would be right.
    """
    _check_dtypes(inputs)
    num_rows, num_sequences = len(inputs.input_ids), len(inputs.past_lens)
    if not 1 <= num_rows <= spec.max_num_tokens:
        raise InvalidStepError(f"the step has {num_rows} rows; the engine takes 1 to {spec.max_num_tokens}")
    if not 1 <= num_sequences <= spec.max_batch_size:
        raise InvalidStepError(f"the step has {num_sequences} sequences; the engine takes 1 to {spec.max_batch_size}")

    row_counts = _counts("subsequence_begins", inputs.subsequence_begins, num_sequences, num_rows)
    table_lens = _counts("block_indices_begins", inputs.block_indices_begins, num_sequences, len(inputs.block_indices))
    _check_range("input_ids", inputs.input_ids, spec.vocab_size)
    _check_range("sampled_rows", inputs.sampled_rows, num_rows)
    _check_range("block_indices", inputs.block_indices, num_blocks)
    _check_range("past_lens", inputs.past_lens, spec.max_seq_len)
    _check_positions(inputs, row_counts)

    context_lens = inputs.past_lens + row_counts
    if context_lens.max() > spec.max_seq_len:
        sequence = int(context_lens.argmax())
        raise InvalidStepError(
            f"past_lens[{sequence}] is {inputs.past_lens[sequence]} and the sequence has {row_counts[sequence]} rows: "
            f"{context_lens[sequence]} tokens exceed max_seq_len {spec.max_seq_len}"
        )
    missing = context_lens > table_lens * spec.tokens_per_block
    if missing.any():
        sequence = int(missing.argmax())
        raise InvalidStepError(
            f"block_indices gives sequence {sequence} {table_lens[sequence]} blocks of {spec.tokens_per_block} tokens; "
            f"its {context_lens[sequence]} tokens need {-(-int(context_lens[sequence]) // spec.tokens_per_block)}"
        )
    _check_unique(inputs, table_lens, spec, num_blocks)


def validate_block_ids(block_ids: NDArray[np.integer[Any]], num_blocks: int) -> None:
    """Check block ids given to `copy_blocks`, `read_block` or `write_block`.

    Raises:
        InvalidStepError: an id is not in `[0, num_blocks)`.
    """
    _check_range("block_ids", block_ids, num_blocks)


def _check_dtypes(inputs: StepInputs) -> None:
    for name, dtype in _DTYPES.items():
        array: NDArray[np.generic] = getattr(inputs, name)
        if array.dtype != dtype or array.ndim != 1:
            raise InvalidStepError(
                f"{name} is {array.dtype} with {array.ndim} dimensions; it must be {np.dtype(dtype)} with 1"
            )


def _counts(name: str, begins: NDArray[np.int32], num_sequences: int, end: int) -> NDArray[np.int32]:
    """Differences of a `begins` field, once it is known to run from 0 to `end` in steps of at least 1."""
    if len(begins) != num_sequences + 1:
        raise InvalidStepError(f"{name} has {len(begins)} entries; {num_sequences} sequences take {num_sequences + 1}")
    if begins[0] != 0 or begins[-1] != end:
        raise InvalidStepError(f"{name} runs from {begins[0]} to {begins[-1]}; it must run from 0 to {end}")
    counts = begins[1:] - begins[:-1]
    if counts.min() < 1:
        sequence = int(counts.argmin())
        raise InvalidStepError(
            f"{name}[{sequence}] is {begins[sequence]}, the next {begins[sequence + 1]}: "
            "every sequence has at least one row and one block"
        )
    return counts


def _check_range(name: str, values: NDArray[np.integer[Any]], limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        index = int(((values < 0) | (values >= limit)).argmax())
        raise InvalidStepError(f"{name}[{index}] is {values[index]}, not in [0, {limit})")


def _check_positions(inputs: StepInputs, row_counts: NDArray[np.int32]) -> None:
    if len(inputs.position_ids) != len(inputs.input_ids):
        raise InvalidStepError(
            f"position_ids has {len(inputs.position_ids)} entries for {len(inputs.input_ids)} input_ids"
        )
    offsets = inputs.past_lens - inputs.subsequence_begins[:-1]
    expected = np.arange(len(inputs.input_ids)) + np.repeat(offsets, row_counts)
    wrong = inputs.position_ids != expected
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidStepError(
            f"position_ids[{row}] is {inputs.position_ids[row]}; past_lens and subsequence_begins imply {expected[row]}"
        )


def _check_unique(inputs: StepInputs, table_lens: NDArray[np.int32], spec: EngineSpec, num_blocks: int) -> None:
    """No block twice in one table (two tables may share blocks: a reused prefix), but outside the window."""
    owners = np.repeat(np.arange(len(table_lens)), table_lens)
    keys = owners * num_blocks + inputs.block_indices
    if spec.sliding_window is not None:
        first_read = (inputs.past_lens - spec.sliding_window + 1) // spec.tokens_per_block
        index = np.arange(len(keys)) - inputs.block_indices_begins[owners]
        keys = keys[index >= first_read[owners]]
    keys.sort()
    twice = keys[1:] == keys[:-1]
    if twice.any():
        sequence, block = divmod(int(keys[twice.argmax()]), num_blocks)
        raise InvalidStepError(f"block_indices holds block {block} twice in the table of sequence {sequence}")
