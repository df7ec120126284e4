"""Which kernels a step launches: told by its shape alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_build.kernels.plan import Launch, StepShape, num_splits, plan_step, workspace_shapes
from engine_build.kernels.shape import AttentionShape

LAYER = AttentionShape(32, 8, 128, 16, "bfloat16", "bfloat16", 128**-0.5)


def launches(num_rows: int, num_sequences: int, context: int, **options: bool) -> list[Launch]:
    return plan_step(LAYER, StepShape(num_rows, num_sequences, context), num_multiprocessors=132, **options)


def names(found: list[Launch]) -> list[str]:
    return [launch.kernel for launch in found]


def test_a_step_of_one_row_each_needs_no_context_kernel() -> None:
    assert names(launches(64, 64, 100)) == ["write_kv", "attend_generation"]
    assert names(launches(1, 1, 4096)) == ["write_kv", "attend_generation", "reduce_splits"]


def test_a_mixed_step_launches_both_and_one_in_deterministic_mode_a_single_kernel() -> None:
    assert names(launches(100, 64, 100)) == ["write_kv", "attend_context", "attend_generation"]
    assert names(launches(100, 64, 4096, deterministic=True)) == ["write_kv", "attend_context"]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_the_context_grid_holds_every_tile_however_the_rows_are_spread(row_counts: list[int]) -> None:
    """Sequence b begins with tile `begin // rows_of_tile + b`: no two share one, none is beyond the grid."""
    step = StepShape(sum(row_counts), len(row_counts), 1000)
    launch = plan_step(LAYER, step, num_multiprocessors=1, deterministic=True)[-1]
    rows_of_tile = int(launch.constants["TILE_QUERIES"]) // LAYER.group_size
    taken: set[int] = set()
    begin = 0
    for sequence, count in enumerate(row_counts):
        first = begin // rows_of_tile + sequence
        tiles = set(range(first, first - (-count // rows_of_tile)))
        assert not tiles & taken
        taken |= tiles
        begin += count
    assert max(taken) < launch.grid[0]


@given(st.integers(1, 512), st.integers(1, 200_000), st.integers(1, 256))
def test_splits_are_a_power_of_two_of_at_least_a_few_tiles_each(sequences: int, context: int, processors: int) -> None:
    splits = num_splits(LAYER, StepShape(sequences, sequences, context), processors)
    assert splits & (splits - 1) == 0
    assert splits == 1 or context // splits >= 256
    assert splits == 1 or splits * sequences * LAYER.num_kv_heads <= 4 * processors


def test_a_workspace_holds_a_tile_for_each_split_and_nothing_where_none_is_split() -> None:
    (_, generation, _) = launches(2, 2, 4096)
    splits = generation.constants["NUM_SPLITS"]
    assert workspace_shapes(generation) == {
        "split_weighted": (2, 8, splits, 16, 128),
        "split_sums": (2, 8, splits, 2, 16),
    }
    assert workspace_shapes(launches(64, 64, 100)[-1]) == {}
