from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.kernels.interpreter import interpreting_process


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with interpreting_process() as process:
        yield process
