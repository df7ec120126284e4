"""The blocking client. Safe to use from several threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Generation:
    """A request's events: iterate it. Leaving its `with` block, or `cancel`, ends the request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Event]:
        """Events as they come; raises the `RequestError` or `CallError` that ended the request."""
        try:
            for message in self._call:
                yield event_of(message)
        except grpc.RpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class InferenceClient:
    """Talks to one server. Close it, or use it in a `with` block."""

    def __init__(self, target: str, options: ConnectionOptions | None = None) -> None:
        """Prepare a connection; nothing is sent yet.

        Args:
            target: `HOST:PORT`.
            options: credentials.
        """
        options = options or ConnectionOptions()
        credentials = options.channel_credentials()
        self._channel = (
            grpc.insecure_channel(target) if credentials is None else grpc.secure_channel(target, credentials)
        )
        self._metadata = options.metadata()
        inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._generate = inference.Generate
        self._methods = {"Abort": inference.Abort, **vars(control_pb2_grpc.ControlStub(self._channel))}

    def generate(
        self, prompt: PromptLike, *, timeout: float | None = None, **fields: Unpack[GenerationFields]
    ) -> Generation:
        """Start a request; its events come from the result.

        Args:
            prompt: text, chat messages or token ids.
            timeout: seconds until the call fails with `CallError` DEADLINE_EXCEEDED.
            fields: those of `GenerationRequest`.
        """
        return self.start(generation_request(prompt, **fields), timeout=timeout)

    def start(self, request: GenerationRequest, *, timeout: float | None = None) -> Generation:
        """Start a request that is put together already; like `generate`."""
        message = request_message(request)
        return Generation(self._generate(message, timeout=timeout, metadata=self._metadata))

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Cancel a live request by its exact id; False when there is none."""
        return self._run(calls.abort(request_id), timeout)

    def iteration_table(self, first_iteration: int = 0, *, timeout: float | None = None) -> list[IterationRow]:
        """The rows that the server recorded, oldest first."""
        return self._run(calls.iteration_table(first_iteration), timeout)

    def server_info(self, *, timeout: float | None = None) -> pb.ServerInfoResponse:
        return self._run(calls.server_info(), timeout)

    def model_info(self, *, timeout: float | None = None) -> pb.ModelInfoResponse:
        return self._run(calls.model_info(), timeout)

    def load(self, *, timeout: float | None = None) -> pb.LoadResponse:
        return self._run(calls.load(), timeout)

    def health(self, *, timeout: float | None = None) -> pb.HealthResponse:
        return self._run(calls.health(), timeout)

    def explain(self, request_id: str, *, timeout: float | None = None) -> list[pb.OutputExplanation]:
        """What each open output of a live request waits for; raises `CallError` NOT_FOUND when there is none."""
        return self._run(calls.explain(request_id), timeout)

    def receipt(self, request_id: str, *, timeout: float | None = None) -> list[pb.OutputReceipt]:
        """What each output of a request that has ended cost; raises `CallError` NOT_FOUND before that, and when too
        many have ended since."""
        return self._run(calls.receipt(request_id), timeout)

    def kv_ledger(self, *, timeout: float | None = None) -> pb.KvLedgerResponse:
        """Who holds which KV cache block, what the tiers hold, what is pinned."""
        return self._run(calls.kv_ledger(), timeout)

    def pin_prefix(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt_id: int | None = None,
        seconds: float | None = None,
        timeout: float | None = None,
    ) -> pb.KvPin:
        """Keep what is cached of a prefix in the pool, for so many seconds or until `unpin_prefix`."""
        return self._run(calls.pin_prefix(token_ids, cache_salt_id, seconds), timeout)

    def unpin_prefix(self, pin_id: int, *, timeout: float | None = None) -> None:
        self._run(calls.unpin_prefix(pin_id), timeout)

    def iteration_stats(self) -> Iterator[pb.IterationStatsResponse]:
        """Every iteration from now on, until the iteration is left."""
        return self._stream("IterationStats", pb.IterationStatsRequest())

    def kv_events(self) -> Iterator[pb.KvEventsResponse]:
        """What happens to KV cache blocks, until the iteration is left."""
        return self._stream("KvEvents", pb.KvEventsRequest())

    def change_role(self, role: InstanceRole, *, timeout: float | None = None) -> None:
        """Let the server take other requests from now on; those that were taken go on."""
        self._run(calls.change_role(role), timeout)

    def pause(self, *, timeout: float | None = None) -> None:
        """Run no iteration until `resume`."""
        self._run(calls.pause(), timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        self._run(calls.resume(), timeout)

    def update_limits(
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
        return self._run(call, timeout)

    def _stream(self, method: str, request: object) -> Iterator[Any]:
        call = self._methods[method](request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None
        finally:
            call.cancel()

    def _run(self, call: Call[_T], timeout: float | None) -> _T:
        method = self._methods[call.method]
        try:
            return call.read(method(call.request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise typed_error(error.code(), error.details(), error.trailing_metadata()) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
