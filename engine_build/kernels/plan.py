"""Which kernels a step launches, and over which grid: told by the step's shape, so nothing waits for the device.

Plain Python, no Triton: the same launches are made by the just-in-time compiler and from code compiled ahead of time.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_build.kernels.shape import (
    EIGHT_BIT_MAXIMA,
    AttentionShape,
    Tiling,
    context_tiling,
    generation_rows,
    generation_tiling,
    padded,
)

_PROGRAMS_PER_MULTIPROCESSOR = 4
_TILES_PER_SPLIT = 4
_MOST_SPLITS = 64


Constants = dict[str, int | float | bool]


class Launch(NamedTuple):
    """One kernel of `paged_attention`, ready but for its tensors."""

    kernel: str
    """A function of `engine_build.kernels.paged_attention`."""
    grid: tuple[int, ...]
    constants: Constants
    """The kernel's capital parameters."""
    num_warps: int
    num_stages: int


class StepShape(NamedTuple):
    """What is known of a step without looking into device memory."""

    num_rows: int
    num_sequences: int
    max_context_len: int
    """Positions of the longest sequence, its rows in this step included; an upper bound will do."""


def plan_step(
    shape: AttentionShape, step: StepShape, *, num_multiprocessors: int, deterministic: bool = False
) -> list[Launch]:
    """The launches of one layer, in the order they must be made.

    Args:
        shape: the layer.
        step: T rows of B sequences.
        num_multiprocessors: of the device; contexts are split as far as it takes to keep them busy.
        deterministic: compute every sequence in the same order of summation, whatever else is in the step.
    """
    launches = [write_launch(shape, step.num_rows)]
    if deterministic:
        return [*launches, context_launch(shape, step, above_rows=0)]
    rows = generation_rows(step.num_rows, step.num_sequences)
    if step.num_rows > step.num_sequences:
        launches.append(context_launch(shape, step, above_rows=rows))
    splits = num_splits(shape, step, num_multiprocessors)
    launches.append(generation_launch(shape, step, rows, splits))
    if splits > 1:
        launches.append(reduce_launch(shape, step, rows, splits))
    return launches


def write_launch(shape: AttentionShape, num_rows: int) -> Launch:
    constants = _layout(shape) | {
        "MAXIMUM": EIGHT_BIT_MAXIMA.get(shape.kv_cache_dtype, 0.0),
        "PADDED_KV_HEADS": padded(shape.num_kv_heads),
        "PADDED_HEAD_SIZE": padded(shape.head_size),
    }
    return Launch("write_kv", (num_rows,), constants, 4, 1)


def context_launch(shape: AttentionShape, step: StepShape, above_rows: int) -> Launch:
    """Sequences of more than `above_rows` rows."""
    tiling = context_tiling(shape)
    rows_of_tile = tiling.tile_queries // shape.group_size
    grid = (step.num_rows // rows_of_tile + step.num_sequences, shape.num_kv_heads)
    return Launch(
        "attend_context",
        grid,
        _attention(shape, tiling) | {"GENERATION_ROWS": above_rows},
        tiling.num_warps,
        tiling.num_stages,
    )


def generation_launch(shape: AttentionShape, step: StepShape, up_to_rows: int, splits: int) -> Launch:
    """Sequences of at most `up_to_rows` rows, each context in `splits` parts."""
    tiling = generation_tiling(shape, up_to_rows)
    constants = _attention(shape, tiling) | {"GENERATION_ROWS": up_to_rows, "NUM_SPLITS": splits}
    grid = (step.num_sequences, shape.num_kv_heads, splits)
    return Launch("attend_generation", grid, constants, tiling.num_warps, tiling.num_stages)


def reduce_launch(shape: AttentionShape, step: StepShape, up_to_rows: int, splits: int) -> Launch:
    constants: Constants = {
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_SIZE": shape.head_size,
        "PADDED_HEAD_SIZE": padded(shape.head_size),
        "TILE_QUERIES": generation_tiling(shape, up_to_rows).tile_queries,
        "GENERATION_ROWS": up_to_rows,
        "NUM_SPLITS": splits,
    }
    return Launch("reduce_splits", (step.num_sequences, shape.num_kv_heads), constants, 4, 1)


def num_splits(shape: AttentionShape, step: StepShape, num_multiprocessors: int) -> int:
    """A power of two: enough programs for the device, none of them with less than a few tiles of context."""
    programs = step.num_sequences * shape.num_kv_heads
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs
    context = min(step.max_context_len, shape.sliding_window or step.max_context_len)
    possible = context // (_TILES_PER_SPLIT * generation_tiling(shape, 1).tile_tokens)
    most = max(1, min(wanted, possible, _MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


def workspace_shapes(launch: Launch) -> dict[str, tuple[int, ...]]:
    """float32 tensors that `attend_generation` leaves for `reduce_splits`; none where nothing is split."""
    splits = launch.constants.get("NUM_SPLITS", 1)
    if launch.kernel != "attend_generation" or splits == 1:
        return {}
    tile, size = int(launch.constants["TILE_QUERIES"]), int(launch.constants["PADDED_HEAD_SIZE"])
    return {"split_weighted": (*launch.grid, tile, size), "split_sums": (*launch.grid, 2, tile)}


def _layout(shape: AttentionShape) -> Constants:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_SIZE": shape.head_size,
        "TOKENS_PER_BLOCK": shape.tokens_per_block,
        "CHUNK": shape.elements_per_chunk,
    }


def _attention(shape: AttentionShape, tiling: Tiling) -> Constants:
    return _layout(shape) | {
        "NUM_HEADS": shape.num_heads,
        "EIGHT_BIT": shape.is_eight_bit,
        "SCALE": shape.scale,
        "SLIDING_WINDOW": shape.sliding_window,
        "SOFT_CAP": shape.soft_cap,
        "PADDED_HEAD_SIZE": padded(shape.head_size),
        "TILE_QUERIES": tiling.tile_queries,
        "TILE_TOKENS": tiling.tile_tokens,
    }
