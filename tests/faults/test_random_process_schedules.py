"""Random faults among real processes: killed and stopped servers, leases that end, clients that leave.

A seed decides everything but the time that processes take. One of thirty always runs, the others with `-m long`.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from executor import SamplingConfig
from executor.client.errors import CallError
from tests.executor.driving import wait_until
from tests.serving.tiny_engine_dir import build_tiny_engine
from tests.transfer.server import Server

pytest.importorskip("nixl_cu12")

TIMEOUT_MS = 1500
NUM_ROUNDS = 8


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


class Schedule:
    """Two servers that compute contexts and may be harmed, one that generates and knows what is right."""

    def __init__(self, stack: ExitStack, engine_dir: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self._stack = stack
        self._engine_dir = engine_dir
        self.contexts = [self.open(), self.open()]
        self.generation = self.open()

    def open(self) -> Server:
        return Server(self._stack, self._engine_dir, "both", TIMEOUT_MS, more_options=["--log_level", "error"])

    def run_round(self) -> str:
        """One request, and what befalls it. Returns the latter."""
        place = self.random.randrange(2)
        context = self.contexts[place]
        sampling = SamplingConfig(temperature=1.0, seed=self.random.randrange(99))
        fields: dict[str, Any] = {
            "prompt": [self.random.randrange(90) for _ in range(self.random.randint(1, 200))],
            "sampling_config": sampling if self.random.random() < 0.5 else SamplingConfig(),
        }
        expected, _ = self.generation.answer(**fields)
        _, params = context.context(**fields)
        fault = self.random.choice(["nothing", "killed", "stopped", "late", "left"])
        after = self.random.uniform(0, 0.02)
        if fault == "late":
            time.sleep(self.random.uniform(0, 1.5 * TIMEOUT_MS / 1000))
        if fault == "left":
            with pytest.raises(CallError, match="DEADLINE_EXCEEDED"):
                self.generation.generation(params, timeout=after, max_tokens=50, **fields)
            return fault
        action: Callable[[], None] = {
            "killed": context.process.kill,
            "stopped": lambda: context.process.send_signal(signal.SIGSTOP),
        }.get(fault, lambda: None)
        timer = threading.Timer(after, action)
        timer.start()
        tokens, _ = self.generation.generation(params, **fields)
        timer.join()
        assert tokens == expected, f"after {fault}"
        if fault == "killed":
            self.contexts[place] = self.open()
        if fault == "stopped":
            context.process.send_signal(signal.SIGCONT)
        return fault


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 30))])
def test_every_answer_is_right_and_every_block_comes_back(engine_dir: Path, seed: int) -> None:
    with ExitStack() as stack:
        schedule = Schedule(stack, engine_dir, seed)
        faults = [schedule.run_round() for _ in range(NUM_ROUNDS)]
        for server in (*schedule.contexts, schedule.generation):
            wait_until(lambda server=server: server.held_blocks() == 0)  # type: ignore[misc]
        tokens, _ = schedule.generation.answer()
        assert schedule.generation.generation(schedule.contexts[0].context()[1])[0] == tokens, faults
