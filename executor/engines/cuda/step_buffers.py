"""One step's inputs as one run of bytes: packed in pinned memory, copied to the device in one go.

```
host    | input_ids   | position_ids   | past_lens | ... |       each field at a multiple of 256 bytes
device  | input_ids   | position_ids   | past_lens | ... |       the same offsets from one address
```

Offsets follow from the fields' sizes alone, so steps of one size find their inputs at the same addresses, which is what
a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.engines.interface import EngineSpec, StepInputs

_ALIGNMENT = 256
_MAX_CONTEXT_LEN = "max_context_len"


class Field(NamedTuple):
    """Where an input lies."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class PackedStep(NamedTuple):
    fields: dict[str, Field]
    num_bytes: int


def input_arrays(inputs: StepInputs) -> dict[str, NDArray[np.generic]]:
    """All a plan may take besides the pools: the step, and the longest context in it."""
    context_lens = inputs.past_lens + np.diff(inputs.subsequence_begins)
    return {**inputs._asdict(), _MAX_CONTEXT_LEN: np.array(context_lens.max(), np.int32)}


def layout(arrays: dict[str, NDArray[np.generic]]) -> PackedStep:
    """Where each array goes."""
    fields: dict[str, Field] = {}
    begin = 0
    for name, array in arrays.items():
        fields[name] = Field(begin, array.shape, array.dtype)
        begin += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return PackedStep(fields, begin)


def pack(arrays: dict[str, NDArray[np.generic]], memory: NDArray[np.uint8]) -> PackedStep:
    """Write the arrays into `memory` as `layout` says."""
    packed = layout(arrays)
    for name, array in arrays.items():
        begin = packed.fields[name].offset
        memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def largest_step_bytes(spec: EngineSpec) -> int:
    """Bytes that any step of an engine packs into, padding included."""
    rows = np.zeros(spec.max_num_tokens, np.int64)
    sequences = np.zeros(spec.max_batch_size + 1, np.int32)
    entries = np.zeros(spec.max_batch_size * blocks_per_sequence(spec), np.int32)
    inputs = StepInputs(rows, rows, sequences, sequences, entries, sequences, rows)
    return layout({**inputs._asdict(), _MAX_CONTEXT_LEN: np.array(0, np.int32)}).num_bytes


def blocks_per_sequence(spec: EngineSpec) -> int:
    return -(-spec.max_seq_len // spec.tokens_per_block)


def spread(sizes: Sequence[int], most: int) -> Sequence[int]:
    """So many of the sizes, the largest among them; all of them for 0."""
    if most == 0 or most >= len(sizes):
        return sizes
    return [sizes[-1 - index * len(sizes) // most] for index in reversed(range(most))]


def is_generation(inputs: StepInputs) -> bool:
    """Whether every sequence has one row, and all of them are sampled in order."""
    num_rows = len(inputs.input_ids)
    return num_rows == len(inputs.past_lens) and np.array_equal(inputs.sampled_rows, np.arange(num_rows))


def pad_generation(inputs: StepInputs, padded: int, scratch_block: int, entries: int) -> StepInputs:
    """Pad a generation step to `padded` rows, and its block tables to `entries` for each of them.

    Padding rows are sequences of their own whose only block is `scratch_block`. Entries behind the last table belong to
    no sequence.
    """
    num_rows = len(inputs.input_ids)
    padding = padded - num_rows
    used = len(inputs.block_indices)
    tables = np.full(padded * entries, scratch_block, np.int32)
    tables[:used] = inputs.block_indices
    more = np.arange(1, padding + 1, dtype=np.int32)
    zeros = np.zeros(padding, np.int64)
    return StepInputs(
        input_ids=np.concatenate((inputs.input_ids, zeros)),
        position_ids=np.concatenate((inputs.position_ids, zeros)),
        past_lens=np.concatenate((inputs.past_lens, zeros.astype(np.int32))),
        subsequence_begins=np.concatenate((inputs.subsequence_begins, num_rows + more)),
        block_indices=tables,
        block_indices_begins=np.concatenate((inputs.block_indices_begins, used + more)),
        sampled_rows=np.arange(padded),
    )
