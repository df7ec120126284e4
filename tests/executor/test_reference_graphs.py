"""Recorded generation steps of the reference engine, with a recorder that does the work again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.engines.reference import ReferenceEngine
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import engine_spec, reference_engine, write_tiny_network

NUM_BLOCKS = 64


class Replays:
    """Implements `Recorder`; counts."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        work()

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_network(TinyCheckpoint(), tmp_path_factory.mktemp("tiny"))


def recording_engine(model_path: Path, num_graph_sizes: int = 0) -> tuple[ReferenceEngine, Replays]:
    replays = Replays()
    spec = engine_spec(tiny_config())
    return (
        ReferenceEngine(model_path, spec, NUM_BLOCKS, recorder=replays, num_graph_sizes=num_graph_sizes),
        replays,
    )


@settings(max_examples=15, deadline=None)
@given(
    past_lens=st.lists(st.integers(0, 20), min_size=1, max_size=10),
    num_graph_sizes=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_recorded_steps_give_what_steps_without_graphs_give(
    past_lens: list[int], num_graph_sizes: int, seed: int, model_path: Path
) -> None:
    """Contexts of all lengths, then two generation steps."""
    generator = np.random.default_rng(seed)
    tables = np.split(generator.permutation(NUM_BLOCKS)[: 6 * len(past_lens)], len(past_lens))
    tokens = generator.integers(0, 128, (len(past_lens), 30)).tolist()
    engine, replays = recording_engine(model_path, num_graph_sizes)
    engine.warm_up()
    reference = reference_engine(model_path, tiny_config())
    parts = [(0, past) for past in past_lens]
    for advance in range(3):
        spans = parts if advance == 0 else [(past + advance - 1, past + advance) for past in past_lens]
        pieces = [
            Piece(ids[:end], begin, end, table[: -(-end // 4)].tolist())
            for ids, table, (begin, end) in zip(tokens, tables, spans, strict=True)
            if end > begin
        ]
        if not pieces:
            continue
        step = pack(pieces, 4)
        np.testing.assert_array_equal(engine.execute(step), reference.execute(step))
    assert replays.num_replays >= 2
    for block in np.concatenate(tables):
        np.testing.assert_array_equal(engine.read_block(int(block)), reference.read_block(int(block)))


def test_logits_stay_when_the_next_step_is_replayed(model_path: Path) -> None:
    engine, _ = recording_engine(model_path)
    engine.warm_up()
    first = engine.submit(pack([Piece([5], 0, 1, [3])], 4))
    second = engine.submit(pack([Piece([9], 0, 1, [4])], 4))
    logits = second()
    assert not np.array_equal(first(), logits)
    np.testing.assert_array_equal(
        first(), reference_engine(model_path, tiny_config()).execute(pack([Piece([5], 0, 1, [3])], 4))
    )


def test_contexts_and_steps_before_the_warm_up_run_without_graphs(model_path: Path) -> None:
    engine, replays = recording_engine(model_path)
    engine.execute(pack([Piece([5], 0, 1, [3])], 4))
    assert replays.num_recorded == 0
    assert engine.padded_rows(3) == 4
    engine.warm_up()
    engine.warm_up()
    assert replays.num_recorded == len({engine.padded_rows(rows) for rows in range(1, 17)})
    engine.execute(pack([Piece([5, 6], 0, 2, [3])], 4))
    engine.execute(pack([Piece([5], 0, 1, [3])], 4, []))
    assert replays.num_replays == 0
    engine.execute(pack([Piece([5], 0, 1, [3])], 4))
    assert replays.num_replays == 1
    assert engine.padded_rows(17) == 17
