"""What the gRPC service costs above the engine, with an engine that returns tokens at once.

    scripts/bench_service [--quick] [--json]

A server process with a fake executor serves 64 streams to a client process. Reported, and printed as JSON with --json:

    cpu_us_per_token_64          CPU time of the server process for each streamed token, without that of the fake
                                 engine's thread. The engine makes a token for each stream every 20 ms, so that every
                                 token is a message of its own.
    cpu_us_per_token_64_at_once  the same with an engine that does not wait: tokens that are ready together travel
                                 together
    messages_per_token_at_once   how far they do
    first_byte_ms_p50            from the call to the first token, one request at a time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc

from executor.serving.garbage import settle_garbage_collector
from executor.serving.grpc_server import GrpcConfig
from executor.serving.server import Server, ServerConfig
from executor.text import Tokenizer
from protos.inflight.v1 import inference_pb2, inference_pb2_grpc
from tests.serving.byte_tokenizer import END_ID, write_byte_tokenizer
from tests.serving.fake_executor import FakeExecutor

STREAMS = 64
STEP_SECONDS = 0.02


class Cost(NamedTuple):
    """CPU seconds of the server process, and of them the engine's."""

    process: float
    engine: float


class Streamed(NamedTuple):
    tokens: int
    messages: int


def serve(pipe: Connection, step_seconds: float) -> None:
    """In a process of its own: serve until told to stop, answering each message with the cost so far."""
    asyncio.run(serve_on_loop(pipe, step_seconds))


async def serve_on_loop(pipe: Connection, step_seconds: float) -> None:
    executor = FakeExecutor(step_seconds=step_seconds)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = Tokenizer(write_byte_tokenizer(Path(directory) / "tokenizer"))
    config = ServerConfig("bench", (END_ID,), GrpcConfig(port=0))
    server = Server(executor, tokenizer, config)
    settle_garbage_collector()
    pipe.send((await server.start()).grpc)
    while await asyncio.to_thread(pipe.recv):
        pipe.send(Cost(time.process_time(), executor.cpu_seconds))
    await server.stop()
    executor.shutdown()


async def stream(stub: inference_pb2_grpc.InferenceStub, num_tokens: int) -> Streamed:
    request = inference_pb2.GenerateRequest(text="The quick brown fox", max_tokens=num_tokens, streaming=True)
    tokens = messages = 0
    async for event in stub.Generate(request):
        if event.HasField("delta"):
            tokens += len(event.delta.token_ids)
            messages += 1
    return Streamed(tokens, messages)


async def first_byte_ms(stub: inference_pb2_grpc.InferenceStub, num_requests: int) -> float:
    times = []
    for _ in range(num_requests):
        started = time.perf_counter()
        call = stub.Generate(inference_pb2.GenerateRequest(text="The quick brown fox", max_tokens=1, streaming=True))
        async for event in call:
            if event.HasField("delta"):
                times.append(time.perf_counter() - started)
    return 1000 * median(times)


async def measure(step_seconds: float, num_tokens: int, num_first_bytes: int) -> tuple[float, float, float]:
    """CPU microseconds per token, messages per token, milliseconds to the first byte."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, step_seconds))
    process.start()
    target = f"127.0.0.1:{here.recv()}"

    def cost() -> Cost:
        here.send(True)
        used: Cost = here.recv()
        return used

    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(stream(stub, 5) for _ in range(STREAMS)))
        first_byte = await first_byte_ms(stub, num_first_bytes) if num_first_bytes else 0.0
        before = cost()
        streamed = await asyncio.gather(*(stream(stub, num_tokens) for _ in range(STREAMS)))
        after = cost()
    here.send(False)
    process.join()
    tokens = sum(one.tokens for one in streamed)
    used = (after.process - before.process) - (after.engine - before.engine)
    return 1e6 * used / tokens, sum(one.messages for one in streamed) / tokens, first_byte


async def run(quick: bool) -> dict[str, float]:
    num_tokens = 150 if quick else 500
    paced, _, _ = await measure(STEP_SECONDS, num_tokens, 0)
    at_once, messages, first_byte = await measure(0.0, num_tokens, 50 if quick else 300)
    return {
        "cpu_us_per_token_64": round(paced, 1),
        "cpu_us_per_token_64_at_once": round(at_once, 1),
        "messages_per_token_at_once": round(messages, 3),
        "first_byte_ms_p50": round(first_byte, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the gRPC service costs above the engine.")
    parser.add_argument("--quick", action="store_true", help="fewer tokens: seconds instead of a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments.quick))
    if arguments.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
