"""The asyncio client. Use it on the loop it was made on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from batch_manager.iteration_table import IterationRow
from executor.api.role import InstanceRole
from executor.client import calls
from executor.client.calls import Call
from executor.client.connection import ConnectionOptions
from executor.client.errors import typed_error
from executor.client.messages import GenerationFields, PromptLike, event_of, generation_request, request_message
from executor.serving.events import Event
from executor.serving.generation_request import GenerationRequest
from protos.inflight.v1 import control_pb2 as pb
from protos.inflight.v1 import control_pb2_grpc, inference_pb2_grpc

_T = TypeVar("_T")


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
        inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._generate = inference.Generate
        self._methods = {"Abort": inference.Abort, **vars(control_pb2_grpc.ControlStub(self._channel))}

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
        return AsyncGeneration(self._generate(message, timeout=timeout, metadata=self._metadata))

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Cancel a live request by its exact id; False when there is none."""
        return await self._run(calls.abort(request_id), timeout)

    async def iteration_table(self, first_iteration: int = 0, *, timeout: float | None = None) -> list[IterationRow]:
        """The rows that the server recorded, oldest first."""
        return await self._run(calls.iteration_table(first_iteration), timeout)

    async def server_info(self, *, timeout: float | None = None) -> pb.ServerInfoResponse:
        return await self._run(calls.server_info(), timeout)

    async def model_info(self, *, timeout: float | None = None) -> pb.ModelInfoResponse:
        return await self._run(calls.model_info(), timeout)

    async def load(self, *, timeout: float | None = None) -> pb.LoadResponse:
        return await self._run(calls.load(), timeout)

    async def health(self, *, timeout: float | None = None) -> pb.HealthResponse:
        return await self._run(calls.health(), timeout)

    async def explain(self, request_id: str, *, timeout: float | None = None) -> list[pb.OutputExplanation]:
        """What each open output of a live request waits for; raises `CallError` NOT_FOUND when there is none."""
        return await self._run(calls.explain(request_id), timeout)

    async def receipt(self, request_id: str, *, timeout: float | None = None) -> list[pb.OutputReceipt]:
        """What each output of a request that has ended cost; raises `CallError` NOT_FOUND before that, and when too
        many have ended since."""
        return await self._run(calls.receipt(request_id), timeout)

    async def kv_ledger(self, *, timeout: float | None = None) -> pb.KvLedgerResponse:
        """Who holds which KV cache block, what the tiers hold, what is pinned."""
        return await self._run(calls.kv_ledger(), timeout)

    async def pin_prefix(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt_id: int | None = None,
        seconds: float | None = None,
        timeout: float | None = None,
    ) -> pb.KvPin:
        """Keep what is cached of a prefix in the pool, for so many seconds or until `unpin_prefix`."""
        return await self._run(calls.pin_prefix(token_ids, cache_salt_id, seconds), timeout)

    async def unpin_prefix(self, pin_id: int, *, timeout: float | None = None) -> None:
        await self._run(calls.unpin_prefix(pin_id), timeout)

    def iteration_stats(self) -> AsyncIterator[pb.IterationStatsResponse]:
        """Every iteration from now on, until the iteration is left."""
        return self._stream("IterationStats", pb.IterationStatsRequest())

    def kv_events(self) -> AsyncIterator[pb.KvEventsResponse]:
        """What happens to KV cache blocks, until the iteration is left."""
        return self._stream("KvEvents", pb.KvEventsRequest())

    async def change_role(self, role: InstanceRole, *, timeout: float | None = None) -> None:
        """Let the server take other requests from now on; those that were taken go on."""
        await self._run(calls.change_role(role), timeout)

    async def pause(self, *, timeout: float | None = None) -> None:
        """Run no iteration until `resume`."""
        await self._run(calls.pause(), timeout)

    async def resume(self, *, timeout: float | None = None) -> None:
        await self._run(calls.resume(), timeout)

    async def update_limits(
        self,
        *,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_queue_size: int | None = None,
        max_queued_tokens: int | None = None,
        timeout: float | None = None,
    ) -> pb.Limits:
        """Change the limits that are named; returns those in force."""
        call = calls.update_limits(max_batch_size, max_num_tokens, max_queue_size, max_queued_tokens)
        return await self._run(call, timeout)

    async def _stream(self, method: str, request: object) -> AsyncIterator[Any]:
        try:
            async for message in self._methods[method](request, metadata=self._metadata):
                yield message
        except grpc.aio.AioRpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None

    async def _run(self, call: Call[_T], timeout: float | None) -> _T:
        method = self._methods[call.method]
        try:
            return call.read(await method(call.request, timeout=timeout, metadata=self._metadata))
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
