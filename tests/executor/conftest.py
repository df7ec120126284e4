"""An engine directory of a tiny random Llama, for tests of the whole Executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor import Executor, ExecutorConfig
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

torch.set_num_threads(1)
"""The tensors are so small that handing work to a second thread takes longer than doing it."""


@pytest.fixture(scope="session")
def tiny_engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reference target, blocks of 4 tokens, at most 16 sequences and 64 rows in a step, 256 tokens a sequence."""
    checkpoint = TinyCheckpoint(tiny_config())
    target = select_target("reference")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=16, max_num_tokens=64, max_seq_len=256, tokens_per_block=4
    )
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    build_engine(checkpoint, build_config, target, directory, lambda *_: None)
    return directory


@pytest.fixture
def open_executor(tiny_engine_dir: Path) -> Iterator[Callable[..., Executor]]:
    """Opens executors on the tiny engine and shuts them down after the test."""
    opened: list[Executor] = []

    def open_one(**config: object) -> Executor:
        opened.append(Executor(tiny_engine_dir, ExecutorConfig(**config)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for executor in opened:
        executor.shutdown()
