"""Two servers, each a process: contexts go from one to the other by NIXL, requests and answers over gRPC."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor import ContextPhaseParams, RequestType, SamplingConfig, WrongRoleError
from executor.client import Delta, Finished, InferenceClient
from tests.serving.server_process import serving
from tests.serving.tiny_engine_dir import build_tiny_engine

pytest.importorskip("nixl_cu12")

CONTEXT_ONLY, GENERATION_ONLY = RequestType.REQUEST_TYPE_CONTEXT_ONLY, RequestType.REQUEST_TYPE_GENERATION_ONLY
PROMPT = [index % 90 for index in range(100)]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


class Server:
    """A server process and a client of it."""

    def __init__(self, stack: ExitStack, engine_dir: Path, role: str, timeout_ms: int = 3000) -> None:
        options = ["--role", role, "--kv_transfer_timeout_ms", str(timeout_ms), "--deterministic", "--num_threads", "1"]
        self.process, target = stack.enter_context(serving(engine_dir, *options))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.fullmatch(r"transfers on 127\.0\.0\.1:\d+\n", line), line
        self.client = stack.enter_context(InferenceClient(target))

    def context(self, **fields: object) -> tuple[list[int], ContextPhaseParams]:
        tokens, finished = self.answer(request_type=CONTEXT_ONLY, **fields)
        assert finished.context_phase_params is not None
        return tokens, finished.context_phase_params

    def generation(self, params: ContextPhaseParams, **fields: object) -> tuple[list[int], Finished]:
        return self.answer(request_type=GENERATION_ONLY, context_phase_params=params, **fields)

    def answer(self, **fields: object) -> tuple[list[int], Finished]:
        wanted: dict[str, object] = {"max_tokens": 12, "ignore_eos": True, "timeout": 60} | fields
        events = list(self.client.generate(PROMPT, **wanted))  # type: ignore[arg-type]
        tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        assert isinstance(events[-1], Finished)
        return tokens, events[-1]

    def free_blocks(self) -> int:
        return self.client.load(timeout=10).free_blocks


@pytest.fixture(scope="module")
def servers(engine_dir: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        yield Server(stack, engine_dir, "both"), Server(stack, engine_dir, "generation")


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, seed=5)], ids=["greedy", "seed"]
)
def test_the_answer_is_that_of_one_server(servers: tuple[Server, Server], sampling: SamplingConfig) -> None:
    context, generation = servers
    expected, _ = context.answer(sampling_config=sampling)
    first, params = context.context(sampling_config=sampling)
    tokens, finished = generation.generation(params, sampling_config=sampling)
    assert first == expected[:1]
    assert tokens == expected
    assert finished.usage.completion_tokens == 12
