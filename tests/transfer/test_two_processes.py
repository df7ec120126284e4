"""Two servers, each a process: contexts go from one to the other by NIXL, requests and answers over gRPC."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor import RequestError, SamplingConfig, WrongRoleError
from executor.api.role import InstanceRole
from executor.cli import app as command_line
from executor.client import Delta, Finished
from executor.client.errors import CallError
from tests.executor.driving import wait_until
from tests.serving.tiny_engine_dir import build_tiny_engine
from tests.transfer.server import CONTEXT_ONLY, GENERATION_ONLY, PROMPT, Server

pytest.importorskip("nixl_cu12")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


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


def test_log_probabilities_are_those_of_one_server(servers: tuple[Server, Server]) -> None:
    context, generation = servers

    def log_probs(**fields: object) -> list[float]:
        events = context.client.generate if "context_phase_params" not in fields else generation.client.generate
        answer = events(PROMPT, max_tokens=6, ignore_eos=True, return_log_probs=True, timeout=60, **fields)  # type: ignore[arg-type]
        return [entry.log_prob for event in answer if isinstance(event, Delta) for entry in event.log_probs]

    expected = log_probs()
    _, params = context.context(max_tokens=6, return_log_probs=True)
    assert log_probs(request_type=GENERATION_ONLY, context_phase_params=params) == expected


def test_a_role_takes_its_own_requests_only(servers: tuple[Server, Server]) -> None:
    _, generation = servers
    with pytest.raises(WrongRoleError, match="role is generation, which takes REQUEST_TYPE_GENERATION_ONLY"):
        generation.answer()


def test_a_running_server_takes_another_role(
    engine_dir: Path, servers: tuple[Server, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has offered before goes on, and so does what is under way."""
    other, _ = servers
    with ExitStack() as stack:
        server = Server(stack, engine_dir, "context")
        expected, _ = other.answer()
        _, params = server.context()
        live = server.client.generate(PROMPT, max_tokens=1, request_type=CONTEXT_ONLY, timeout=60)
        server.client.change_role(InstanceRole.GENERATION)
        with pytest.raises(WrongRoleError, match="role is generation"):
            server.context()
        assert isinstance(list(live)[-1], Finished)
        assert other.generation(params)[0] == expected
        _, params = other.context()
        assert server.generation(params)[0] == expected
        with pytest.raises(SystemExit):
            command_line(["role", server.target, "both"])
        assert capsys.readouterr().out == f"both, transfers on {server.transfers}\n"
        assert server.answer()[0] == expected


def test_a_context_that_nobody_continues_gives_its_blocks_back(engine_dir: Path) -> None:
    """Timers run while the server is idle."""
    with ExitStack() as stack:
        server = Server(stack, engine_dir, "context", timeout_ms=400)
        server.context()
        assert server.held_blocks() > 0
        wait_until(lambda: server.held_blocks() == 0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "cut off"])
def test_a_context_whose_server_is_gone_is_computed_anew(
    engine_dir: Path, servers: tuple[Server, Server], end: signal.Signals
) -> None:
    """Stopped, it is as if the network were cut: nothing comes, and nothing says so. The others go on meanwhile."""
    other, generation = servers
    with ExitStack() as stack:
        context = Server(stack, engine_dir, "context")
        expected, _ = other.answer()
        _, params = context.context()
        context.process.send_signal(end)
        _, others_params = other.context()
        started = time.monotonic()
        assert generation.generation(others_params)[0] == expected
        assert time.monotonic() - started < 2
        assert generation.generation(params)[0] == expected
        assert time.monotonic() - started < 10
        wait_until(lambda: generation.held_blocks() == 0)


def test_a_receiver_that_is_killed_costs_the_sender_nothing(engine_dir: Path, servers: tuple[Server, Server]) -> None:
    context, _ = servers
    with ExitStack() as stack:
        generation = Server(stack, engine_dir, "generation")
        _, params = context.context()
        generation.process.kill()
        with pytest.raises((RequestError, CallError)):
            generation.generation(params)
    wait_until(lambda: context.held_blocks() == 0)


def test_a_server_that_was_restarted_is_not_taken_for_its_predecessor(engine_dir: Path) -> None:
    """The same address, other blocks."""
    with ExitStack() as stack:
        generation = Server(stack, engine_dir, "both")
        expected, _ = generation.answer()
        first = Server(stack, engine_dir, "context")
        _, params = first.context()
        first.process.kill()
        first.process.wait()
        Server(stack, engine_dir, "context", listen=first.transfers)
        assert generation.generation(params)[0] == expected
