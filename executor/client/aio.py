"""The asyncio client. Use it on the loop it was made on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Unpack

import grpc

from batch_manager.iteration_table import IterationRow
from executor.client.connection import ConnectionOptions
from executor.client.errors import typed_error
from executor.client.messages import (
    GenerationFields,
    PromptLike,
    event_of,
    generation_request,
    iteration_rows,
    request_message,
)
from executor.serving.events import Event
from executor.serving.generation_request import GenerationRequest
from protos.inflight.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc


class AsyncGeneration:
    """A request's events: iterate it with `async for`. Leaving its `with` block, or `cancel`, ends the request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events as they come; raises the `RequestError` or `CallError` that ended the request."""
        try:
            async for message in self._call:
                yield event_of(message)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> AsyncGeneration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncInferenceClient:
    """Talks to one server. Close it, or use it in an `async with` block."""

    def __init__(self, target: str, options: ConnectionOptions | None = None) -> None:
        """Prepare a connection; nothing is sent yet.

        Args:
            target: `HOST:PORT`.
            options: credentials.
        """
        options = options or ConnectionOptions()
        credentials = options.channel_credentials()
        self._channel = (
            grpc.aio.insecure_channel(target) if credentials is None else grpc.aio.secure_channel(target, credentials)
        )
        self._metadata = options.metadata()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def generate(
        self, prompt: PromptLike, *, timeout: float | None = None, **fields: Unpack[GenerationFields]
    ) -> AsyncGeneration:
        """Start a request; its events come from the result.

        Args:
            prompt: text, chat messages or token ids.
            timeout: seconds until the call fails with `CallError` DEADLINE_EXCEEDED.
            fields: those of `GenerationRequest`.
        """
        return self.start(generation_request(prompt, **fields), timeout=timeout)

    def start(self, request: GenerationRequest, *, timeout: float | None = None) -> AsyncGeneration:
        """Start a request that is put together already; like `generate`."""
        message = request_message(request)
        return AsyncGeneration(self._inference.Generate(message, timeout=timeout, metadata=self._metadata))

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Cancel a live request by its exact id; False when there is none."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        response = await self._call(self._inference.Abort, request, timeout)
        return bool(response.outcome == inference_pb2.ABORT_OUTCOME_ABORTED)

    async def iteration_table(self, first_iteration: int = 0, *, timeout: float | None = None) -> list[IterationRow]:
        """The rows that the server recorded, oldest first."""
        request = control_pb2.IterationTableRequest(first_iteration=first_iteration)
        return iteration_rows(await self._call(self._control.IterationTable, request, timeout))

    async def server_info(self, *, timeout: float | None = None) -> control_pb2.ServerInfoResponse:
        response: control_pb2.ServerInfoResponse = await self._call(
            self._control.ServerInfo, control_pb2.ServerInfoRequest(), timeout
        )
        return response

    async def model_info(self, *, timeout: float | None = None) -> control_pb2.ModelInfoResponse:
        response: control_pb2.ModelInfoResponse = await self._call(
            self._control.ModelInfo, control_pb2.ModelInfoRequest(), timeout
        )
        return response

    async def load(self, *, timeout: float | None = None) -> control_pb2.LoadResponse:
        response: control_pb2.LoadResponse = await self._call(self._control.Load, control_pb2.LoadRequest(), timeout)
        return response

    async def _call(self, method: Any, request: object, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncInferenceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
