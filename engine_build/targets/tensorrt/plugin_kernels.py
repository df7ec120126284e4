"""The kernels of a layer's attention as TensorRT launches them: one a plugin, with the parameters that it passes.

```
TensorRT passes     every input | extra scalars | every output
```

A pool that is written in place is an input and an output, so its address comes twice; the kernel takes the second. The
first gets a parameter of its own in the PTX that nothing reads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine_build.kernels.compile import CompiledKernel, compile_kernel
from engine_build.kernels.plan import (
    Launch,
    StepShape,
    context_launch,
    generation_launch,
    num_splits,
    reduce_launch,
    workspace_shapes,
    write_launch,
)
from engine_build.kernels.shape import AttentionShape, generation_rows
from engine_build.targets.interface import TargetError

_ENTRY = re.compile(r"(\.visible\s+\.entry\s+(\w+)\s*\()(.*?)(\))", re.DOTALL)
_A_STEP = StepShape(num_rows=2, num_sequences=1, max_context_len=1)
"""Grids are TensorRT's to compute; the rest of a launch does not depend on the step."""
_ROWS = generation_rows(_A_STEP.num_rows, _A_STEP.num_sequences)
"""A plugin cannot know whether a step has prompts in it, so every step counts as one that has."""
_MULTIPROCESSORS = 128
"""Of the devices that plans are built for, about."""
_FEWEST_SPLITS = 2


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Compiles the kernels of all layers of one shape, each once."""

    shape: AttentionShape
    num_splits: int
    """Parts of every context in `attend_generation`; at least 2, since with 1 it would write no workspace."""
    compute_capability: str

    def write(self) -> CompiledKernel:
        """`key, value, past_lens, subsequence_begins, block_indices, block_indices_begins, key_cache, value_cache`
        | `num_sequences` | `key_cache, value_cache`."""
        return _with_unread(self._compile(write_launch(self.shape, 1)), at=6, count=2)

    def context(self) -> CompiledKernel:
        """`query, past_lens, subsequence_begins, block_indices, block_indices_begins, key_cache, value_cache`
        | `num_sequences` | `output`."""
        return self._compile(context_launch(self.shape, _A_STEP, above_rows=_ROWS))

    def generation(self) -> CompiledKernel:
        """As `context`, then its output | | `split_weighted, split_sums`."""
        return self._compile(self._generation_launch())

    def reduce(self) -> CompiledKernel:
        """`split_weighted, split_sums, subsequence_begins, output` | | `output`."""
        return _with_unread(self._compile(reduce_launch(self.shape, _A_STEP, _ROWS, self.num_splits)), at=3, count=1)

    @property
    def rows_of_context_tile(self) -> int:
        """The grid of `context` is `T // this + B` by key heads."""
        launch = context_launch(self.shape, _A_STEP, above_rows=_ROWS)
        return int(launch.constants["TILE_QUERIES"]) // self.shape.group_size

    @property
    def workspace(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `split_weighted` and `split_sums` behind their first dimension, which is the sequences."""
        return {name: shape[1:] for name, shape in workspace_shapes(self._generation_launch()).items()}

    def _generation_launch(self) -> Launch:
        return generation_launch(self.shape, _A_STEP, _ROWS, self.num_splits)

    def _compile(self, launch: Launch) -> CompiledKernel:
        return _compiled(self.shape, launch.kernel, self.num_splits, self.compute_capability)


def splits_for(shape: AttentionShape, max_batch_size: int, max_seq_len: int) -> int:
    """Parts of a context that serve a half-full batch."""
    sequences = max(1, max_batch_size // 2)
    step = StepShape(num_rows=sequences, num_sequences=sequences, max_context_len=max_seq_len)
    return max(_FEWEST_SPLITS, num_splits(shape, step, _MULTIPROCESSORS))


@functools.cache
def _compiled(shape: AttentionShape, kernel: str, splits: int, compute_capability: str) -> CompiledKernel:
    launches = (
        write_launch(shape, 1),
        context_launch(shape, _A_STEP, above_rows=_ROWS),
        generation_launch(shape, _A_STEP, _ROWS, splits),
        reduce_launch(shape, _A_STEP, _ROWS, splits),
    )
    return compile_kernel(shape, next(launch for launch in launches if launch.kernel == kernel), compute_capability)


def _with_unread(kernel: CompiledKernel, at: int, count: int) -> CompiledKernel:
    """Put `count` pointers that nothing reads before parameter `at`; code refers to parameters by name, not place."""
    found = _ENTRY.search(kernel.ptx)
    if found is None:
        raise TargetError(f"the code of kernel {kernel.entry} has no entry")
    declared = [parameter.strip() for parameter in found[3].split(",")]
    unread = [f".param .u64 {kernel.entry}_unread_{index}" for index in range(count)]
    parameters = ",\n\t".join([*declared[:at], *unread, *declared[at:]])
    ptx = kernel.ptx[: found.start(3)] + "\n\t" + parameters + "\n" + kernel.ptx[found.end(3) :]
    names: Sequence[str] = [*kernel.parameters[:at], *(["unread"] * count), *kernel.parameters[at:]]
    return kernel._replace(ptx=ptx, parameters=tuple(names))
