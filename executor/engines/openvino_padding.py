"""Pads steps to a few sizes.

OpenVINO makes new matrix kernels for every number of rows it has not seen, which takes 10 to 180 ms. So rows T and
sampled rows S are padded to sizes that `warm_up` has run.

```
rows       | r0 r0 r0 | r1 | p p p p |      padding rows are one more sequence, without past,
tables     | 7 2      | 5  | s s     |      whose block table holds the scratch block only
sampled       2   3   0                     padding samples repeat row 0; their logits are cut off
```
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from executor.engines.interface import StepInputs


def padded_sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Sizes in ascending order: steps of 4 rows up to 32, then four sizes for each doubling, at last `largest`.

    So padding is at most a quarter of the rows, on average an eighth, and a few sizes cover any budget.
    """
    sizes = [smallest]
    while sizes[-1] < largest:
        step = max(4, (1 << sizes[-1].bit_length()) // 8)
        sizes.append(min(largest, (sizes[-1] // step + 1) * step))
    return tuple(sizes)


def padded_size(num_rows: int, sizes: tuple[int, ...]) -> int:
    """The size that a step of so many rows is padded to; more rows than the largest size are not."""
    return sizes[bisect_left(sizes, num_rows)] if num_rows <= sizes[-1] else num_rows


def pad_step(inputs: StepInputs, sizes: tuple[int, ...], scratch_block: int, tokens_per_block: int) -> StepInputs:
    """Pad a valid step of at most `sizes[-1]` rows. Steps that sample nothing stay so: the head is skipped for them."""
    num_rows, num_samples = len(inputs.input_ids), len(inputs.sampled_rows)
    if num_samples:
        padding_samples = padded_size(num_samples, sizes) - num_samples
        inputs = inputs._replace(
            sampled_rows=np.concatenate((inputs.sampled_rows, np.zeros(padding_samples, np.int64)))
        )
    padded_rows = padded_size(num_rows, sizes)
    padding = padded_rows - num_rows
    if not padding:
        return inputs
    table = np.full(-(-padding // tokens_per_block), scratch_block, np.int32)
    return inputs._replace(
        input_ids=np.concatenate((inputs.input_ids, np.zeros(padding, np.int64))),
        position_ids=np.concatenate((inputs.position_ids, np.arange(padding))),
        past_lens=np.append(inputs.past_lens, np.int32(0)),
        subsequence_begins=np.append(inputs.subsequence_begins, np.int32(padded_rows)),
        block_indices=np.concatenate((inputs.block_indices, table)),
        block_indices_begins=np.append(inputs.block_indices_begins, np.int32(len(inputs.block_indices) + len(table))),
    )
