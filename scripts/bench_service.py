"""What the gRPC service costs above the engine, with an engine that returns tokens at once.

    scripts/bench_service [--quick] [--json]

A server process with a fake executor serves 64 streams to a client process. Reported, and printed as JSON with --json:

    cpu_us_per_token_64          CPU time of the server process for each streamed token, without that of the fake
                                 engine's thread. The engine makes a token for each stream every 20 ms, so that every
                                 token is a message of its own.
    cpu_us_per_token_64_bare     the same for a server that does nothing but send such messages with grpc.aio, at the
                                 same pace and on the same event loop: what gRPC itself costs. Measured in turns with
                                 the one above; of both, the median of the turns
    cpu_us_per_token_64_at_once  with an engine that does not wait: tokens that are ready together travel together
    messages_per_token_at_once   how far they do
    first_byte_ms_p50            from the call to the first token, one request at a time
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

from one_line_parser import OneLineParser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import uvloop

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


class Measured(NamedTuple):
    us_per_token: float
    messages_per_token: float
    first_byte_ms: float


def serve(pipe: Connection, step_seconds: float) -> None:
    """In a process of its own: serve until told to stop, answering each message with the cost so far."""
    uvloop.run(serve_on_loop(pipe, step_seconds))


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


def serve_bare(pipe: Connection, step_seconds: float) -> None:
    """The same with gRPC alone: no requests, no text, no events."""
    uvloop.run(BareServer(step_seconds).serve(pipe))


class BareServer:
    """Sends every stream a message at each step: as many as the request has `max_tokens`."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._waiting: list[asyncio.Future[None]] = []
        self._engine_seconds = 0.0
        self._stopped = threading.Event()

    async def serve(self, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        message = inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x", token_ids=[120]))

        async def generate(request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
            for _ in range(request.max_tokens):
                step = loop.create_future()
                self._waiting.append(step)
                await step
                await context.write(message)

        handler = grpc.unary_stream_rpc_method_handler(
            generate,
            request_deserializer=inference_pb2.GenerateRequest.FromString,
            response_serializer=inference_pb2.GenerateResponse.SerializeToString,
        )
        server = grpc.aio.server()
        service = grpc.method_handlers_generic_handler("inflight.v1.Inference", {"Generate": handler})
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        engine = threading.Thread(target=self._step, args=(loop,))
        engine.start()
        settle_garbage_collector()
        pipe.send(port)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(Cost(time.process_time(), self._engine_seconds))
        self._stopped.set()
        engine.join()
        await server.stop(None)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(self._step_seconds):
            loop.call_soon_threadsafe(self._wake)
            self._engine_seconds = time.thread_time()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if not step.done():
                step.set_result(None)


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


async def measure(
    server: Callable[[Connection, float], None], step_seconds: float, num_tokens: int, num_first_bytes: int = 0
) -> Measured:
    """Run 64 streams of so many tokens, and so many short requests one after the other."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=server, args=(there, step_seconds))
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
    return Measured(1e6 * used / tokens, sum(one.messages for one in streamed) / tokens, first_byte)


async def run(quick: bool) -> dict[str, float]:
    num_tokens, turns = (250, 3) if quick else (500, 5)
    paced, bare = [], []
    for _ in range(turns):
        paced.append((await measure(serve, STEP_SECONDS, num_tokens)).us_per_token)
        bare.append((await measure(serve_bare, STEP_SECONDS, num_tokens)).us_per_token)
    at_once = await measure(serve, 0.0, num_tokens, 50 if quick else 300)
    return {
        "cpu_us_per_token_64": round(median(paced), 1),
        "cpu_us_per_token_64_bare": round(median(bare), 1),
        "cpu_us_per_token_64_at_once": round(at_once.us_per_token, 1),
        "messages_per_token_at_once": round(at_once.messages_per_token, 3),
        "first_byte_ms_p50": round(at_once.first_byte_ms, 2),
    }


def main() -> None:
    parser = OneLineParser(prog="scripts/bench_service", description="What the gRPC service costs above the engine.")
    parser.add_argument("--quick", action="store_true", help="fewer tokens: seconds instead of minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = uvloop.run(run(arguments.quick))
    if arguments.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
