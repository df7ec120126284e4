"""Instances as processes: calls over gRPC, bytes by NIXL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import Message

from executor.transfer.credentials import PeerCredentials
from executor.transfer.methods import METHODS
from executor.transfer.nixl_transport import NixlTransport
from executor.transfer.peer import PeerError, TransferService

_SERVICE = "inflight.v1.Transfer"
_ANSWERING_THREADS = 4
_MAX_MESSAGE_BYTES = 16 << 20
"""A prompt's token ids and the block ids of a context are the largest things sent: both are far below."""


class GrpcNetwork:
    """Implements `TransferNetwork`.

    Without credentials, calls are neither encrypted nor authenticated: listen on loopback or on a network that only
    instances can reach. Whoever reaches the port can read what is in the cache.
    """

    def __init__(self, credentials: PeerCredentials | None = None) -> None:
        """`credentials`: what is shown to peers and asked of them."""
        self._credentials = credentials

    def open_transport(self, instance_id: bytes) -> NixlTransport:
        """See `TransferNetwork.open_transport`. Raises `UnsupportedFeatureError` where NIXL is not installed."""
        return NixlTransport(instance_id.hex())

    def serve(self, service: TransferService, listen: str) -> GrpcServer:
        """See `TransferNetwork.serve`."""
        return GrpcServer(service, listen, self._credentials)

    def link(self, address: str) -> GrpcLink:
        """See `TransferNetwork.link`."""
        return GrpcLink(address, self._credentials)


class GrpcServer:
    """Implements `ServedAddress`."""

    def __init__(self, service: TransferService, listen: str, credentials: PeerCredentials | None) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise OSError(f"{listen!r} is no address; it must be HOST:PORT")
        self._threads = ThreadPoolExecutor(_ANSWERING_THREADS, "transfer-service")
        self._server = grpc.server(
            self._threads,
            options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        )
        handlers = {name: _handler(service, name) for name in METHODS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(listen)
            else:
                bound = self._server.add_secure_port(listen, credentials.of_server())
        except RuntimeError as error:
            self._threads.shutdown()
            raise OSError(f"cannot listen on {listen} for transfers: {error}") from error
        self._server.start()
        self.address = f"{host}:{bound}"

    def stop(self) -> None:
        """See `ServedAddress.stop`."""
        self._server.stop(None).wait()
        self._threads.shutdown()


def _handler(service: TransferService, method: str) -> Any:
    request_type, response_type = METHODS[method]

    def answer(request: Message, _context: grpc.ServicerContext) -> Message:
        return service.answer(method, request)

    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=request_type.FromString, response_serializer=response_type.SerializeToString
    )


class GrpcLink:
    """Implements `PeerLink`."""

    def __init__(self, address: str, credentials: PeerCredentials | None) -> None:
        # A peer that comes back is met again within a second, not after the default two minutes.
        options = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials.of_client(), options)
        self._address = address
        self._calls = {
            name: self._channel.unary_unary(
                f"/{_SERVICE}/{name}",
                request_serializer=request_type.SerializeToString,
                response_deserializer=response_type.FromString,
            )
            for name, (request_type, response_type) in METHODS.items()
        }

    def call(self, method: str, request: Message, timeout: float, on_done: Callable[[], None]) -> GrpcCall:
        """See `PeerLink.call`."""
        future = self._calls[method].future(request, timeout=timeout)
        future.add_done_callback(lambda _: on_done())
        return GrpcCall(future, f"{method} at {self._address}")

    def close(self) -> None:
        self._channel.close()


class GrpcCall:
    """Implements `PendingCall`."""

    def __init__(self, future: grpc.Future, what: str) -> None:
        self._future = future
        self._what = what

    def done(self) -> bool:
        """See `PendingCall.done`."""
        return bool(self._future.done())

    def answer(self) -> Any:
        """See `PendingCall.answer`."""
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise PeerError(f"{self._what} failed: {error.code().name}: {error.details()}") from error
