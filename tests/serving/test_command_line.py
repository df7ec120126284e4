"""`executor serve`, `generate` and `chat` as processes, on a tiny engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from batch_manager.plan import Phase
from batch_manager.request import FinishReason
from executor import GuidedDecodingParams
from executor.api.errors import ExecutorShutDownError
from executor.cli import app
from executor.client import AsyncGeneration, AsyncInferenceClient, ChatMessage, Delta, Finished, InferenceClient
from executor.serving.request_log import LineFormatter
from protos.inflight.v1 import control_pb2, control_pb2_grpc
from tests.serving.server_process import ROOT, serving
from tests.serving.tiny_engine_dir import build_tiny_engine


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


def run_executor(*arguments: str | Path, said: str = "") -> Result:
    """The command in this process: importing the libraries again for each test would take most of the time."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=said)


@pytest.fixture(scope="module")
def server(engine_dir: Path) -> Iterator[str]:
    with serving(engine_dir, "--iteration_table_max_rows", "10000") as (_, target):
        yield target


def test_an_answer_streams_from_a_real_engine(server: str) -> None:
    with InferenceClient(server) as client:
        events = list(client.generate([ChatMessage("user", "hello")], max_tokens=20, ignore_eos=True, timeout=60))
    assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 20
    assert sum(isinstance(event, Finished) for event in events) == 1


def test_an_answer_follows_its_grammar(server: str) -> None:
    pytest.importorskip("llguidance")
    guide = GuidedDecodingParams(GuidedDecodingParams.GuideType.REGEX, "(yes|no|maybe)")
    with InferenceClient(server) as client:
        events = list(client.generate("is it so?", max_tokens=20, guided_decoding_params=guide, timeout=60))
    assert "".join(event.text for event in events if isinstance(event, Delta)) in ("yes", "no", "maybe")


async def test_the_same_request_gives_the_same_tokens_alone_and_among_others(server: str) -> None:
    async with AsyncInferenceClient(server) as client:

        async def tokens(prompt: str) -> list[int]:
            events = client.generate(prompt, max_tokens=24, ignore_eos=True, timeout=60)
            return [token async for event in events if isinstance(event, Delta) for token in event.token_ids]

        alone = await tokens("a prompt of its own")
        among = await asyncio.gather(
            *(tokens(f"{number}: something else") for number in range(7)), tokens("a prompt of its own")
        )
        assert among[-1] == alone


async def test_one_iteration_holds_context_and_generation_requests(server: str) -> None:
    async with AsyncInferenceClient(server) as client:
        first = client.generate("first", max_tokens=120, ignore_eos=True, timeout=60)
        stream = aiter(first)
        while not isinstance(await anext(stream), Delta):
            pass
        _ = [event async for event in client.generate("second", max_tokens=4, ignore_eos=True, timeout=60)]
        rows = await client.iteration_table()
        first.cancel()
    phases: dict[int, set[Phase]] = {}
    for row in rows:
        phases.setdefault(row.iteration, set()).add(row.phase)
    assert {Phase.CONTEXT, Phase.GENERATION} in phases.values()


def test_an_operator_pauses_resumes_and_changes_limits(server: str) -> None:
    with grpc.insecure_channel(server) as channel, InferenceClient(server) as client:
        control = control_pb2_grpc.ControlStub(channel)
        before = client.server_info(timeout=10).limits
        control.Pause(control_pb2.PauseRequest())
        events = iter(client.generate("x", max_tokens=4, ignore_eos=True, timeout=60, request_id="paused"))
        next(events)
        reason = control.Explain(control_pb2.ExplainRequest(request_id="paused")).outputs[0].wait_reason
        assert reason.code == control_pb2.WAIT_CODE_PAUSED_BY_OPERATOR
        control.UpdateLimits(control_pb2.UpdateLimitsRequest(max_batch_size=2, max_num_tokens=32))
        control.Resume(control_pb2.ResumeRequest())
        assert sum(isinstance(event, Finished) for event in events) == 1
        with pytest.raises(grpc.RpcError, match=r"max_num_tokens is 65; the engine was built for 64"):
            control.UpdateLimits(control_pb2.UpdateLimitsRequest(max_num_tokens=65))
        after = client.server_info(timeout=10).limits
        assert (after.max_batch_size, after.max_num_tokens) == (2, 32)
        control.UpdateLimits(
            control_pb2.UpdateLimitsRequest(max_batch_size=before.max_batch_size, max_num_tokens=before.max_num_tokens)
        )


def test_clients_that_are_killed_leave_no_request_behind(server: str) -> None:
    program = (
        "import sys; from executor.client import InferenceClient\n"
        "for event in InferenceClient(sys.argv[1]).generate('x', max_tokens=230, ignore_eos=True):\n"
        "    print('on', flush=True)"
    )
    client = subprocess.Popen([sys.executable, "-c", program, server], stdout=subprocess.PIPE, cwd=ROOT)
    assert client.stdout is not None
    client.stdout.readline()
    client.kill()
    client.communicate()
    with InferenceClient(server) as observer:
        deadline = time.monotonic() + 10
        while observer.load(timeout=5).num_unfinished_requests:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        _ = list(observer.generate("y", max_tokens=2, ignore_eos=True, timeout=60))
        assert observer.load(timeout=5).latest_iteration.used_num_blocks == 0


async def test_clients_that_leave_at_random_moments_leave_no_block_in_use(server: str) -> None:
    """Blocks of requests whose clients had gone were once kept."""
    moments = random.Random(0)
    async with AsyncInferenceClient(server) as client:

        async def leave(number: int) -> None:
            generation = client.generate(f"{number} " * 20, max_tokens=150, ignore_eos=True, timeout=60)
            reading = asyncio.ensure_future(read_all(generation))
            await asyncio.wait([reading], timeout=moments.uniform(0, 0.5))
            generation.cancel()
            reading.cancel()
            await asyncio.wait([reading])

        await asyncio.gather(*(leave(number) for number in range(100)))
        async with asyncio.timeout(30):
            while (await client.load()).num_unfinished_requests:
                await asyncio.sleep(0.02)
        assert await read_all(client.generate("y", max_tokens=2, ignore_eos=True, timeout=60)) == 1
        assert (await client.load()).latest_iteration.used_num_blocks == 0


async def read_all(generation: AsyncGeneration) -> int:
    return sum([isinstance(event, Finished) async for event in generation])


def test_sigterm_finishes_open_requests_and_ends_with_0(engine_dir: Path) -> None:
    with serving(engine_dir) as (process, target), InferenceClient(target) as client:
        events = iter(client.generate("x", max_tokens=200, ignore_eos=True, timeout=60))
        next(events)
        process.send_signal(signal.SIGTERM)
        finished = [event for event in events if isinstance(event, Finished)]
        assert [event.finish_reason for event in finished] == [FinishReason.LENGTH]
        assert process.wait(30) == 0


def test_a_second_sigterm_ends_open_requests_at_once_and_says_so_in_one_line(engine_dir: Path) -> None:
    with serving(engine_dir, "--drain_seconds", "60") as (process, target), InferenceClient(target) as client:
        client.pause()
        events = iter(client.generate("x", timeout=60))
        next(events)
        process.send_signal(signal.SIGTERM)
        while client.health().state != control_pb2.HEALTH_STATE_DRAINING:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ExecutorShutDownError, match="stopped before the request had ended"):
            list(events)
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
        assert sum("SIGTERM again" in line for line in log.splitlines()) == 1
        assert "Traceback" not in log


def test_metrics_are_served_without_http(engine_dir: Path) -> None:
    with serving(engine_dir, "--metrics_port", "0") as (process, target), InferenceClient(target) as client:
        assert process.stdout is not None
        match = re.fullmatch(r"metrics on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert match is not None
        list(client.generate("x", max_tokens=3, ignore_eos=True, timeout=60))
        page = httpx.get(f"http://{match[1]}/metrics").text
        assert 'inflight_requests_total{outcome="LENGTH"} 1.0' in page
        assert httpx.get(f"http://{match[1]}/v1/models").status_code == 404


def test_http_is_served_beside_grpc_and_log_lines_are_json(engine_dir: Path) -> None:
    with serving(engine_dir, "--http_port", "0", "--log_json") as (process, _):
        assert process.stdout is not None
        match = re.fullmatch(r"http on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert match is not None
        secret = "not to be logged"
        body = {"prompt": secret, "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"http://{match[1]}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert "inflight_iterations_total" in httpx.get(f"http://{match[1]}/metrics", timeout=60).text
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
        assert process.returncode == 0
    lines = [json.loads(line) for line in logged.splitlines()]
    ended = [line for line in lines if line["logger"] == "executor.requests"]
    assert [(line["outcome"], line["completion_tokens"]) for line in ended] == [("LENGTH", 5)]
    assert secret not in logged


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(engine_dir: Path, server: str) -> None:
    done = run_executor("serve", engine_dir, "--port", server.split(":")[1], "--log_level", "error")
    assert done.exit_code == 2
    assert f"error: cannot listen on {server}" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_prints_answers_and_the_table(engine_dir: Path, tmp_path: Path) -> None:
    done = run_executor(
        "generate", engine_dir, "--prompt", "one", "--prompt", "two", "--max_tokens", "5", "--ignore_eos", "--raw",
        "--table", "--table_csv", tmp_path / "rows.csv",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "[0] -- LENGTH, 5 tokens" in done.stdout
    assert "[1] -- LENGTH, 5 tokens" in done.stdout
    assert "iterations;" in done.stdout
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "text is empty"),
        (["--prompt", "x", "--max_tokens", "0"], "max_tokens is 0"),
        (["--prompt", "x" * 300], "the prompt has 300 tokens"),
        (["--prompt", "x", "--top_p", "2"], "sampling_config.top_p is 2"),
        (["--prompt", "x", "--max_batch_size", "1000"], "max_batch_size is 1000"),
        (["--prompt", "x", "--kv_cache_dtype", "int3"], "kv_cache_dtype is 'int3'"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(engine_dir: Path, options: list[str], message: str) -> None:
    done = run_executor("generate", engine_dir, "--raw", *options)
    assert done.exit_code == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert message in lines[0]


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"], ["chat"]])
def test_a_directory_that_is_no_engine_is_one_line_and_exit_code_2(command: list[str], tmp_path: Path) -> None:
    done = run_executor(command[0], tmp_path, *command[1:])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert str(tmp_path) in done.stderr


def test_chat_answers_each_line_and_remembers_the_conversation(engine_dir: Path, server: str) -> None:
    for target in (server, str(engine_dir)):
        done = run_executor("chat", target, "--max_tokens", "4", said="hello\nagain\n")
        assert done.exit_code == 0, done.stderr
        assert done.stdout.count("> ") == 3


def test_chat_with_nobody_is_one_line_and_exit_code_2_before_anything_is_asked() -> None:
    done = run_executor("chat", "127.0.0.1:1", said="hello\n")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_file_that_is_missing_is_named_without_the_number_of_its_error(tmp_path: Path) -> None:
    done = run_executor("chat", "127.0.0.1:1", "--bearer_token_file", tmp_path / "token")
    assert done.exit_code == 2
    assert done.stderr.strip() == f"error: {tmp_path / 'token'}: No such file or directory"


def test_an_answer_without_max_tokens_is_bounded_by_a_pool_smaller_than_the_longest_sequence(engine_dir: Path) -> None:
    done = run_executor("generate", engine_dir, "--prompt", "hello", "--kv_cache_max_tokens", "64")
    assert done.exit_code == 0, done.stderr


def test_the_demo_client_fails_without_a_server_and_succeeds_with_one(server: str) -> None:
    script = ROOT / "scripts" / "demo_client.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def demo(target: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script, target, "--max_tokens", "30"],
            capture_output=True, text=True, timeout=120, check=False, env=environment,
        )  # fmt: skip

    assert demo("127.0.0.1:1").returncode == 2
    done = demo(server)
    assert re.search(r"of 8 answers: [\d.]+ tokens/s, \d+ ms to first token", done.stdout), done.stdout + done.stderr
    assert done.returncode == (0 if "8 of 8 answers" in done.stdout else 1)


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("generate", "--prompt", "x")])
def test_a_damaged_network_is_one_line_and_not_a_traceback(
    engine_dir: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(engine_dir, damaged)
    network = damaged / "model.onnx"
    network.write_bytes(bytes(network.stat().st_size))
    result = run_executor(command[0], damaged, *command[1:])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: OpenVINO cannot compile {network}")


def test_a_log_line_stays_one_line_whatever_a_client_puts_into_it() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "request %s ended\u2028", ("x\ny\x1b[2J é",), None)
    assert LineFormatter("%(message)s").format(record) == r"request x\ny\x1b[2J é ended\u2028"


def test_an_empty_prompt_is_refused_though_a_chat_template_would_fill_it(engine_dir: Path) -> None:
    result = run_executor("generate", engine_dir, "--prompt", "x", "--prompt", "", "--chat")
    assert result.exit_code == 2
    assert "error: --prompt: the text is empty" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve"], "error: Missing argument 'ENGINE_DIR' (see executor serve --help)"),
        (["serve", "E", "--prot", "1"], "(see executor serve --help)"),
        (["generate", "E", "--prompt", "x", "--top_k", "many"], "'--top_k'"),
        (["generate", "E"], "'--prompt'"),
        (["kv", "a", "b"], "(see executor kv --help)"),
        (["srve"], "error: No such command 'srve'"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_option_and_the_help(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="executor")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert line in result.stderr
    assert " --help)" in result.stderr


def test_options_are_described_in_full_under_their_concerns() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    for heading in ("Limits:", "How the engine runs:", "KV cache below the pool:", "Where, and for whom:"):
        assert heading in text.splitlines()
    assert "--secondary_offload_min_priority <" in text


@pytest.mark.parametrize("endpoint", ["collector", "collector:4317", "http://", "http://host", "http://host:port"])
def test_a_collector_that_is_no_url_is_refused(endpoint: str) -> None:
    result = CliRunner().invoke(app, ["serve", "E", "--otlp_endpoint", endpoint], prog_name="executor")
    assert result.exit_code == 2
    assert f"'--otlp_endpoint': '{endpoint}' is not http://HOST:PORT or https://HOST:PORT" in result.stderr


@pytest.mark.parametrize("flag", ["--port", "--http_port", "--metrics_port"])
def test_a_port_that_is_taken_is_refused_before_the_engine_is_loaded(
    flag: str, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr("executor.cli.opening.Executor", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        ports = {"--port": "0", flag: number}
        result = run_executor("serve", engine_dir, *(part for pair in ports.items() for part in pair))
    assert result.exit_code == 2, result.exception
    assert result.stderr.strip() == f"error: cannot listen on 127.0.0.1:{number}: Address already in use"


def test_an_answer_without_max_tokens_is_bounded_in_a_terminal(
    engine_dir: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.cli.options.DEFAULT_MAX_TOKENS", 5)
    done = run_executor("generate", engine_dir, "--prompt", "hello", "--prompt", "again", "--ignore_eos")
    assert "[0] -- LENGTH, 5 tokens" in done.stdout, done.stderr
    for target in (server, str(engine_dir)):
        done = run_executor("chat", target, said="hello\nagain\n")
        assert done.exit_code == 0, done.stderr
        assert done.stdout.count("> ") == 3
        assert len(done.stdout) < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "127.0.0.1:99999"], "'127.0.0.1:99999' has port 99999; ports are 1 to 65535"),
        (["kv", "127.0.0.1:0"], "has port 0; ports are 1 to 65535"),
        (["role", "127.0.0.1:70000"], "has port 70000; ports are 1 to 65535"),
        (["serve", "E", "--iteration_table_max_rows", "9" * 30], "'--iteration_table_max_rows'"),
        (["serve", "E", "--event_buffer_max_size", "9" * 30], "'--event_buffer_max_size'"),
        (["generate", "E", "--prompt", "x", "--table_csv", "/missing/a.csv"], "/missing: no such folder to write into"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="executor")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert message in result.stderr
