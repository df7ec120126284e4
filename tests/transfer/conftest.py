"""Instances on the tiny engine, joined by a network of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import Executor
from executor.transfer.local_network import LocalNetwork
from tests.executor.conftest import open_executor, tiny_engine_dir
from tests.transfer.instances import OpenInstance, instance

__all__ = ["open_executor", "tiny_engine_dir"]


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork()


@pytest.fixture
def open_instance(tiny_engine_dir: Path, network: LocalNetwork) -> Iterator[OpenInstance]:
    """Opens instances on the tiny engine and shuts them down after the test."""
    opened: list[Executor] = []

    def open_one(**config: Any) -> Executor:
        opened.append(instance(config.pop("engine_dir", tiny_engine_dir), config.pop("network", network), **config))
        return opened[-1]

    yield open_one
    for executor in opened:
        executor.shutdown()
