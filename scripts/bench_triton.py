"""What Triton Inference Server costs above the Executor, and the bridge between them above an echo.

    scripts/bench_triton [--quick] [--json]

Sides that are compared run in turns on the same machine, against the same real server:

    ratio_vs_executor   tokens/s of 32 streams of the demo model through Triton, over those of the Executor alone
    two_over_one        wall time of two overlapping requests through Triton, over that of one
    ratio_vs_echo       responses/s of `tensorrt_llm` with an engine that returns at once, over those of a Python model
                        that answers with the same tensors by itself
    ratio_vs_grpc       tokens/s that the bridge's socket carries, over those that inflight.v1 over gRPC carries, both
                        from an engine that returns at once, without Triton
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from one_line_parser import OneLineParser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import numpy as np
from bench_engine import demo_engine
from bench_service import serve

from executor import Executor, ExecutorConfig, KvCacheConfig, Request
from executor.triton.backend.wire import FrameWriter, frame, receive
from executor.triton.priority import PriorityLevels
from executor.triton.repository import RepositoryOptions, write_repository
from executor.triton.requests import RowReader
from executor.triton.worker import Worker
from protos.inflight.v1 import inference_pb2, inference_pb2_grpc
from tests.serving.fake_executor import FakeExecutor
from tests.triton.client import llm_inputs, rows_of
from tests.triton.server import TritonServer, fake_executor_command, running

STREAMS = 32
BRIDGE_STREAMS = 64
PROMPT_TOKENS = 32
OUTPUTS = ("output_ids", "sequence_length")

ECHO_CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 64
model_transaction_policy { decoupled: true }
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [] } },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [] } },
  { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] reshape: { shape: [] } }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] }
]
"""
ECHO_MODEL = """
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=[request, request.get_response_sender()]).start()

    def answer(self, request, sender):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        prompt, count = tensors["input_ids"][0].tolist(), int(tensors["request_output_len"].item())
        for index in range(count):
            outputs = [
                pb_utils.Tensor("output_ids", np.array([[[prompt[index % len(prompt)]]]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[1]], np.int32)),
            ]
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if index == count - 1 else 0
            sender.send(pb_utils.InferenceResponse(outputs), flags=final)
"""


def main() -> None:
    parser = OneLineParser(
        prog="scripts/bench_triton", description="What Triton costs above the Executor, and the bridge above an echo."
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens and runs: under 50 s")
    parser.add_argument("--json", action="store_true", help="the last line of output is one JSON object")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else 5
    with tempfile.TemporaryDirectory() as directory:
        measurements: list[Callable[[], dict[str, float]]] = [
            lambda: measure_transports(repeats, 200 if arguments.quick else 1000),
            lambda: measure_bridge(Path(directory) / "bridge", repeats, 40 if arguments.quick else 200),
            lambda: measure_model(Path(directory) / "model", repeats, 24 if arguments.quick else 64),
        ]
        results: dict[str, float] = {}
        for measure in measurements:
            for name, value in measure().items():
                results[name] = round(value, 3)
                print(f"{name:32} {value:.3f}" if value < 10 else f"{name:32} {value:.0f}", flush=True)
    if arguments.json:
        print(json.dumps(results))


def in_turns(repeats: int, first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float, float]:
    """Medians of two sides that run in turns, and of the ratios of the first to the second."""
    pairs = [(first(), second()) for _ in range(repeats)]
    ones, others = zip(*pairs, strict=True)
    return median(ones), median(others), median(one / other for one, other in pairs)


# -- a real server ----------------------------------------------------------------------------------------------------


async def stream_all(target: str, model: str, prompts: list[list[int]], num_tokens: int) -> float:
    """Stream an answer to each prompt at once, each on a gRPC stream of its own; responses per second."""
    from tritonclient.grpc import InferRequestedOutput
    from tritonclient.grpc.aio import InferenceServerClient

    async def one(client: Any, prompt: list[int]) -> int:
        async def requests() -> Any:
            yield {
                "model_name": model,
                "inputs": llm_inputs([prompt], num_tokens, streaming=rows_of(True, bool)),
                "outputs": [InferRequestedOutput(name) for name in OUTPUTS],
            }

        tokens = 0
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            tokens += int(result.as_numpy("sequence_length")[0, 0])
        return tokens

    async with InferenceServerClient(target) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        seconds = time.perf_counter() - started
    if counts != [num_tokens] * len(prompts):
        raise RuntimeError(f"{model} answered with {counts} tokens instead of {num_tokens} each")
    return sum(counts) / seconds


def through_triton(server: TritonServer, model: str, prompts: list[list[int]], num_tokens: int) -> float:
    return asyncio.run(stream_all(server.target, model, prompts, num_tokens))


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    draws = np.random.default_rng(0).integers(0, vocab_size, (count, PROMPT_TOKENS))
    return [[int(token) for token in prompt] for prompt in draws]


def measure_bridge(directory: Path, repeats: int, num_tokens: int) -> dict[str, float]:
    directory.mkdir()
    repository = directory / "repository"
    command = fake_executor_command(directory)
    write_repository(repository, RepositoryOptions(directory, None, command))
    (repository / "echo" / "1").mkdir(parents=True)
    (repository / "echo" / "config.pbtxt").write_text(ECHO_CONFIG)
    (repository / "echo" / "1" / "model.py").write_text(ECHO_MODEL)
    prompts = random_prompts(STREAMS, 256)
    with running(repository, directory / "log") as server:
        for model in ("tensorrt_llm", "echo"):
            through_triton(server, model, prompts, 10)
        bridge, echo, ratio = in_turns(
            repeats,
            lambda: through_triton(server, "tensorrt_llm", prompts, num_tokens),
            lambda: through_triton(server, "echo", prompts, num_tokens),
        )
    return {"bridge_responses_per_s": bridge, "echo_responses_per_s": echo, "ratio_vs_echo": ratio}


def measure_model(directory: Path, repeats: int, num_tokens: int) -> dict[str, float]:
    directory.mkdir()
    engine_dir = demo_engine()
    repository = directory / "repository"
    parameters = {"max_num_sequences": str(STREAMS), "max_num_tokens": "256", "enable_kv_cache_reuse": "false"}
    command = Path(sys.executable).with_name("executor")
    write_repository(repository, RepositoryOptions(engine_dir, None, command, parameters=parameters))
    config = ExecutorConfig(
        max_batch_size=STREAMS, max_num_tokens=256, kv_cache_config=KvCacheConfig(enable_block_reuse=False)
    )
    with running(repository, directory / "log") as server, Executor(engine_dir, config) as executor:
        prompts = random_prompts(STREAMS, executor.spec.vocab_size)

        def alone() -> float:
            started = time.perf_counter()
            ids = executor.enqueue_requests([Request(prompt, num_tokens, streaming=True) for prompt in prompts])
            unfinished = set(ids)
            while unfinished:
                unfinished -= {response.request_id for response in executor.await_responses() if response.is_final}
            return len(prompts) * num_tokens / (time.perf_counter() - started)

        def seconds(count: int) -> float:
            """Of so many requests at once, through Triton."""
            return count * num_tokens / through_triton(server, "tensorrt_llm", prompts[:count], num_tokens)

        alone()
        seconds(STREAMS)
        triton, executor_alone, ratio = in_turns(repeats, lambda: STREAMS * num_tokens / seconds(STREAMS), alone)
        _, _, two_over_one = in_turns(repeats, lambda: seconds(2), lambda: seconds(1))
    return {
        "triton_tokens_per_s": triton,
        "executor_tokens_per_s": executor_alone,
        "ratio_vs_executor": ratio,
        "two_over_one": two_over_one,
    }


# -- transports, without a server ------------------------------------------------------------------------------------


def serve_bridge(listener: socket.socket) -> None:
    """In a process of its own: an Executor that returns at once, until the connection ends."""
    executor = FakeExecutor()
    worker = Worker(listener, os.getppid())
    reader = RowReader(
        executor.spec.vocab_size, decoupled=True, exclude_input_in_output=False, priorities=PriorityLevels()
    )
    worker.serve(executor, reader, stats_period_seconds=0.1)
    executor.shutdown()


@contextlib.contextmanager
def bridge_connection() -> Iterator[tuple[socket.socket, Any]]:
    """A connection to such a process, and the frames that come from it."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(directory) / "bridge.sock"))
        listener.listen()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(listener.getsockname())
        process = multiprocessing.get_context("spawn").Process(target=serve_bridge, args=[listener])
        process.start()
        connection.sendall(frame({"hello": 1}))
        frames = receive(connection)
        next(frames)
        yield connection, frames
        connection.close()
        process.join()


def bridge_tokens_per_second(connection: socket.socket, frames: Any, num_tokens: int) -> float:
    writer = FrameWriter()
    prompt = np.array([1, 2, 3], np.int32)
    rows = [
        {
            "key": key,
            "timeout_us": 0,
            "parameters": {},
            "tensors": {
                "input_ids": {"array": writer.put(prompt)},
                "input_lengths": 3,
                "request_output_len": num_tokens,
                "streaming": True,
            },
        }
        for key in range(BRIDGE_STREAMS)
    ]
    started = time.perf_counter()
    connection.sendall(writer.frame({"submit": rows, "cancel": []}))
    open_rows = BRIDGE_STREAMS
    tokens = 0
    while open_rows:
        header, _ = next(frames)
        for _, _, token_ids, _, is_final, _ in header.get("events", ()):
            tokens += len(token_ids)
            open_rows -= is_final
    return tokens / (time.perf_counter() - started)


async def grpc_tokens_per_second(target: str, num_tokens: int) -> float:
    async def one(stub: Any) -> int:
        request = inference_pb2.GenerateRequest(
            input_token_ids=inference_pb2.TokenSequence(token_ids=[1, 2, 3]),
            max_tokens=num_tokens,
            streaming=True,
            ignore_eos=True,
        )
        return sum([len(event.delta.token_ids) async for event in stub.Generate(request) if event.HasField("delta")])

    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(stub) for _ in range(BRIDGE_STREAMS)))
        return sum(counts) / (time.perf_counter() - started)


def measure_transports(repeats: int, num_tokens: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, 0.0))
    process.start()
    target = f"127.0.0.1:{here.recv()}"
    with bridge_connection() as (connection, frames):
        bridge_tokens_per_second(connection, frames, 10)
        asyncio.run(grpc_tokens_per_second(target, 10))
        bridge, over_grpc, ratio = in_turns(
            repeats,
            lambda: bridge_tokens_per_second(connection, frames, num_tokens),
            lambda: asyncio.run(grpc_tokens_per_second(target, num_tokens)),
        )
    here.send(False)
    process.join()
    return {"bridge_tokens_per_s": bridge, "grpc_tokens_per_s": over_grpc, "ratio_vs_grpc": ratio}


if __name__ == "__main__":
    main()
