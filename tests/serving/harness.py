"""A server over a fake executor, and raw calls to it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

from executor.serving.credentials import Credentials
from executor.serving.generation import GenerationService
from executor.serving.grpc_server import GrpcConfig
from executor.serving.http.server import HttpConfig
from executor.serving.server import Server, ServerConfig
from executor.text import Tokenizer
from protos.inflight.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.serving.byte_tokenizer import END_ID, write_byte_tokenizer
from tests.serving.fake_executor import FakeExecutor


def load_byte_tokenizer(**options: object) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(write_byte_tokenizer(Path(directory) / "tokenizer", **options))


TOKENIZER = load_byte_tokenizer()


@dataclass
class RunningServer:
    executor: FakeExecutor
    server: Server
    target: str
    channel: grpc.aio.Channel
    url: str
    """Of its HTTP endpoint, with `http=True`."""

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> control_pb2_grpc.ControlStub:
        return control_pb2_grpc.ControlStub(self.channel)

    async def generate(self, **fields: object) -> list[inference_pb2.GenerateResponse]:
        return [event async for event in self.inference.Generate(inference_pb2.GenerateRequest(**fields))]


@asynccontextmanager
async def running_service(
    executor: FakeExecutor | None = None, tokenizer: Tokenizer | None = TOKENIZER, **options: object
) -> AsyncIterator[GenerationService]:
    """The layer below the protocols."""
    executor = executor or FakeExecutor()
    service = GenerationService(executor, tokenizer, end_ids=(END_ID,), **options)
    try:
        yield service
    finally:
        service.close()
        executor.shutdown()


@asynccontextmanager
async def running_server(
    executor: FakeExecutor | None = None,
    *,
    tokenizer: Tokenizer | None = TOKENIZER,
    credentials: Credentials | None = None,
    max_message_bytes: int = 4 << 20,
    channel_options: list[tuple[str, object]] | None = None,
    http: bool = False,
    **options: object,
) -> AsyncIterator[RunningServer]:
    """A gRPC server on a free port, and a plaintext channel to it."""
    executor = executor or FakeExecutor()
    address = ("127.0.0.1", 0, max_message_bytes, credentials or Credentials())
    config = ServerConfig(
        "fake",
        (END_ID,),
        GrpcConfig(*address),
        HttpConfig(*address) if http else None,
        **options,
    )
    server = Server(executor, tokenizer, config)
    ports = await server.start()
    target = f"127.0.0.1:{ports.grpc}"
    try:
        async with grpc.aio.insecure_channel(target, options=channel_options) as channel:
            yield RunningServer(executor, server, target, channel, f"http://127.0.0.1:{ports.http}")
    finally:
        await server.stop()
        executor.shutdown()


def violated_field(error: grpc.aio.AioRpcError) -> str:
    """The field that the status's google.rpc.BadRequest names."""
    for detail in details(error).details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            return bad_request.field_violations[0].field
    return ""


def retry_seconds(error: grpc.aio.AioRpcError) -> int | None:
    """What the status's google.rpc.RetryInfo says."""
    for detail in details(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.seconds
    return None


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()
