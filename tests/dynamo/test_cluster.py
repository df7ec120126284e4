"""Real frontends, routers and workers on this machine, black box over HTTP.

Long: the first run installs Dynamo (400 MB) into a virtual environment of its own, and each cluster takes some seconds
to start. `pytest -m long tests/dynamo`.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor import Executor, ExecutorConfig, KvCacheConfig, SamplingConfig
from executor.text import Tokenizer
from scripts.dynamo_cluster import DynamoCluster
from tests.executor.driving import request as token_request
from tests.executor.driving import run_one
from tests.serving.tiny_engine_dir import ByteCheckpoint

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
WORKER = ("--num_threads", "1", "--kv_cache_max_tokens", "8192", "--deterministic")

BREAKS_SOON = """
from executor.stats import StatsRecorder

record, num_left = StatsRecorder.record, 20

def record_or_break(self, *args, **kwargs):
    global num_left
    num_left -= 1
    if num_left < 0:
        raise RuntimeError("broken on purpose")
    return record(self, *args, **kwargs)

StatsRecorder.record = record_or_break
from executor.cli import main
main()
"""
"""A worker whose scheduler has a fault in its 21st iteration."""

OpenCluster = Callable[..., AbstractContextManager[DynamoCluster]]


@pytest.fixture(scope="session")
def python_with_dynamo() -> str:
    made = subprocess.run(
        [ROOT / "scripts" / "setup_dynamo"], capture_output=True, text=True, timeout=550, check=False, cwd=ROOT
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout.strip()


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes, for sequences of up to 1024."""
    checkpoint, target = ByteCheckpoint(), select_target("openvino")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=16, max_num_tokens=256, max_seq_len=1024, dtype="float32"
    )
    directory = tmp_path_factory.mktemp("engine") / "tiny"
    build_engine(checkpoint, build_config, target, directory, lambda _stage, _done, _total: None)
    return directory


@pytest.fixture(scope="session")
def open_cluster(python_with_dynamo: str, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenCluster:
    @contextmanager
    def opened(*roles: str) -> Iterator[DynamoCluster]:
        directory = tmp_path_factory.mktemp("cluster")
        with DynamoCluster(python_with_dynamo, engine_dir, directory, MODEL, dict(os.environ)) as cluster:
            cluster.start_frontend()
            for role in roles:
                cluster.start_worker("--role", role, *WORKER)
            cluster.wait_until_ready()
            yield cluster

    return opened


@pytest.fixture(scope="module")
def cluster(open_cluster: OpenCluster) -> Iterator[DynamoCluster]:
    with open_cluster("both", "both") as opened:
        yield opened


def body(text: str, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id"]},
    } | fields


def ask(cluster: DynamoCluster, wanted: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=wanted, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    return [entry["token_id"] for entry in answer["choices"][0]["logprobs"]["content"]]


def stream(cluster: DynamoCluster, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Chunks; fails on an error in the stream."""
    url = f"{cluster.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=wanted | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line[6:])
                assert "choices" in chunk, chunk
                yield chunk


def worker_id(answer: dict[str, Any]) -> int:
    number: int = answer["nvext"]["worker_id"]["decode_worker_id"]
    return number


def alone(engine_dir: Path, text: str, max_tokens: int, sampling: SamplingConfig) -> list[int]:
    """The tokens of an executor in this process."""
    tokenizer = Tokenizer(engine_dir / "tokenizer")
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(max_tokens=8192), deterministic=True, num_threads=1)
    with Executor(engine_dir, config) as executor:
        return run_one(executor, token_request(prompt, max_tokens, sampling_config=sampling)).output_token_ids[0][
            -max_tokens:
        ]


def test_tokens_are_those_of_the_executor_alone(cluster: DynamoCluster, engine_dir: Path) -> None:
    assert tokens(ask(cluster, body("a question", 24))) == alone(engine_dir, "a question", 24, SamplingConfig())
    seeded = SamplingConfig(temperature=0.8, seed=11)
    answer = ask(cluster, body("a question", 24, temperature=0.8, seed=11))
    assert tokens(answer) == alone(engine_dir, "a question", 24, seeded)


def test_usage_counts_prompt_output_and_cached_tokens(cluster: DynamoCluster) -> None:
    text = "counted " * 30
    first, second = (ask(cluster, body(text, 5))["usage"] for _ in range(2))
    assert (first["completion_tokens"], first["total_tokens"]) == (5, first["prompt_tokens"] + 5)
    assert second["prompt_tokens_details"]["cached_tokens"] > 200


def test_a_stop_string_ends_an_answer_at_the_frontend(cluster: DynamoCluster) -> None:
    """Dynamo's frontend forgets stop strings where the end token is ignored."""
    wanted = body("go on", 30, logprobs=False, ignore_eos=False)
    text = ask(cluster, wanted)["choices"][0]["message"]["content"]
    stop = next(character for character in text[1:] if character.isascii() and character.isprintable())
    choice = ask(cluster, wanted | {"stop": [stop]})["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text.partition(stop)[0]


def test_a_prompt_that_is_too_long_is_the_clients_fault(cluster: DynamoCluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body("x" * 2000), timeout=60)
    assert response.status_code == 400


def test_what_is_not_offered_is_refused_by_name(cluster: DynamoCluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body("twice", n=2, temperature=1), timeout=60)
    assert response.status_code == 400
    assert "sampling_options.n is 2; only 1 is offered" in response.text


def test_a_conversation_goes_back_to_where_it_is_cached(cluster: DynamoCluster) -> None:
    """Unrelated requests come between, and would turn a router that takes turns."""
    text = "once upon a time " * 20
    first = ask(cluster, body(text, 2))
    for turn in range(5):
        text += f"and then {turn} " * 5
        ask(cluster, body(f"{turn} something else", 2))
        answer = ask(cluster, body(text, 2))
        assert worker_id(answer) == worker_id(first)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 300


def test_salted_prompts_share_with_their_own_salt_only(cluster: DynamoCluster) -> None:
    text = "a secret " * 30

    def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt else {}
        answer = ask(cluster, body(text, 2, nvext={"extra_fields": ["worker_id"], **extra}))
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    found = [cached(salt) for salt in ("first", "first", "first", "second", None)]
    assert found[0] == 0
    assert max(found[1:3]) > 200
    assert max(found[3:]) < 64


def test_a_client_that_leaves_frees_its_place(cluster: DynamoCluster) -> None:
    for number in range(20):  # more than the blocks of both instances would hold, if they stayed
        chunks = stream(cluster, body(f"{number} " + "left alone " * 20, 700))
        next(chunks)
        chunks.close()
    assert len(tokens(ask(cluster, body("still there?", 10)))) == 10


def test_streams_go_on_when_their_instance_is_killed(open_cluster: OpenCluster) -> None:
    prompts = [f"story {number} of many" for number in range(6)]
    with open_cluster("both", "both", "both") as cluster:
        undisturbed = [tokens(ask(cluster, body(prompt, 300))) for prompt in prompts]
        got: list[list[int]] = [[] for _ in prompts]
        reasons: list[str | None] = [None for _ in prompts]
        served: dict[int, int] = {}

        def read(index: int) -> None:
            for chunk in stream(cluster, body(prompts[index], 300)):
                for choice in chunk["choices"]:
                    got[index] += [entry["token_id"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
                    reasons[index] = choice["finish_reason"] or reasons[index]
                workers = (chunk.get("nvext") or {}).get("worker_id") or {}
                served.setdefault(index, workers.get("decode_worker_id") or 0)

        readers = [threading.Thread(target=read, args=(index,)) for index in range(len(prompts))]
        for reader in readers:
            reader.start()
        while any(len(so_far) < 20 for so_far in got) and all(reader.is_alive() for reader in readers):
            pass
        assert all(reader.is_alive() for reader in readers), "the instance is killed while all streams run"
        victim = cluster.worker(max(served.values(), key=list(served.values()).count))
        victim.kill()
        for reader in readers:
            reader.join(60)
        assert got == undisturbed
        assert reasons == ["length"] * len(prompts)


def test_a_worker_whose_executor_breaks_ends_and_loses_no_stream(open_cluster: OpenCluster) -> None:
    with open_cluster("both") as cluster:
        undisturbed = [tokens(ask(cluster, body(f"prompt {number}", 30))) for number in range(8)]
        broken = cluster.start_worker("--role", "both", *WORKER, program=BREAKS_SOON)
        cluster.wait_until_ready()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, cluster, body(f"prompt {number}", 30)) for number in range(8)]
            assert [tokens(answer.result()) for answer in asked] == undisturbed
        assert broken.wait(30) == 2
        assert "error: the executor stopped by itself, and so did its worker" in broken.log.read_text()


def test_a_worker_that_is_told_to_stop_ends_its_streams_first(open_cluster: OpenCluster) -> None:
    with open_cluster("both", "both") as cluster:
        chunks = stream(cluster, body("to the end", 400))
        first = next(chunk for chunk in chunks if (chunk.get("nvext") or {}).get("worker_id"))
        stopping = cluster.worker(first["nvext"]["worker_id"]["decode_worker_id"])
        status: list[int] = []
        stop = threading.Thread(target=lambda: status.append(stopping.terminate()))
        stop.start()
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        stop.join(60)
        assert reasons[-1] == "length"
        assert status == [0]
        assert len(tokens(ask(cluster, body("and the other one?", 5)))) == 5


def test_contexts_on_one_instance_and_generation_on_another_give_the_same_tokens(open_cluster: OpenCluster) -> None:
    wanted = [body(f"{number} hello " * (1 + number * 3), 20) for number in range(8)]
    wanted += [body(f"{number} seeded", 20, temperature=0.9, seed=number) for number in range(4)]
    wanted += [body("one token only", 1)]
    with open_cluster("both") as together:
        expected = [tokens(ask(together, each)) for each in wanted]
    with open_cluster("context", "generation", "generation") as apart:
        assert [tokens(ask(apart, each)) for each in wanted[:-1]] == expected[:-1]
        answer = ask(apart, wanted[-1] | {"logprobs": False})
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
