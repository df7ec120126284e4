"""The one interface behind which every target runs: packed rows in, logits of the sampled rows out.

```
rows      | r0 r0 r0 r0 | r1 | r2 r2 |            T rows, requests packed one behind the other
begins    0             4    5       7            subsequence_begins [B + 1]
blocks    | 7 2 | 5 | 9 1 4 |                     block_indices, request by request
          0     2   3       6                     block_indices_begins [B + 1]
sampled                3   4      6               rows whose logits are wanted
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class StepInputs(NamedTuple):
    """One forward pass over T rows of B sequences, S of them sampled."""

    input_ids: NDArray[np.int64]
    """[T] token ids, in `[0, vocab_size)`."""
    position_ids: NDArray[np.int64]
    """[T] positions; the rows of a sequence are consecutive positions from `past_lens[b]` on."""
    past_lens: NDArray[np.int32]
    """[B] tokens of the sequence that are in the pool already, before its first row."""
    subsequence_begins: NDArray[np.int32]
    """[B + 1] first row of each sequence; ends with T."""
    block_indices: NDArray[np.int32]
    """[N] block tables, concatenated; block ids in `[0, num_blocks)`. Where no row of the sequence attends to any more,
    outside a sliding window, any id will do."""
    block_indices_begins: NDArray[np.int32]
    """[B + 1] first entry of each sequence's block table; ends with N."""
    sampled_rows: NDArray[np.int64]
    """[S] rows whose logits are wanted."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine was built for; fixed for its life."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    kv_bytes_per_block: int
    """Bytes of one block over all layers, keys and values."""
    sliding_window: int | None = None
    """Positions a token attends to, its own included, in every layer; `None`: all of them."""


PendingLogits = Callable[[], NDArray[np.float32]]
"""Waits for a step's logits `[S, vocab_size]`, valid until the next step is submitted. Raises what the step raised."""


class InvalidStepError(ValueError):
    """Step inputs that the engine must not see: names the field and the value."""


class Engine(Protocol):
    spec: EngineSpec
    num_blocks: int
    """Blocks callers may use: ids `0 .. num_blocks - 1`. Scratch space for padding lies beyond, the engine's own."""

    def submit(self, inputs: StepInputs) -> PendingLogits:
        """Begin one forward pass; what comes back waits for it, and is called once before the next `submit`.

        Writes K and V of every row into the pool. One step at a time, from one thread.

        Raises:
            InvalidStepError: an index, length or id is out of range; nothing was computed, nothing written.
        """
        ...

    def execute(self, inputs: StepInputs) -> NDArray[np.float32]:
        """`submit`, for those who have nothing to do meanwhile."""
        return self.submit(inputs)()

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are computed for a step of so many."""
        ...

    def warm_up(self) -> None:
        """Run every padded size once, as far as it matters, so that no request pays for a first call."""
        ...

    def copy_blocks(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy whole blocks inside the pool, all layers, keys and values."""
        ...

    def read_block(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The block's bytes, `[kv_bytes_per_block]`, layer by layer, keys before values; into `out` if that is given.

        May be called beside a step, from any thread, for a block that the step does not write.
        """
        ...

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_block` gave, into this or another block.

        May be called beside a step, from any thread, for a block that the step neither reads nor writes.
        """
        ...

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """The pool itself, in the order of `read_block`: `[num_blocks or more, bytes]` of one layer's keys or values.

        For those who read and write blocks in place, such as transfers to another instance; what a step in flight
        touches is theirs to keep away from.

        Raises:
            UnsupportedFeatureError: the pool is not in main memory.
        """
        ...

    def close(self) -> None: ...
