"""How instances talk: calls of `inflight.v1.Transfer`, made without waiting for the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from executor.transfer.transport import Transport


class PeerError(Exception):
    """A call failed: the peer is gone, does not answer in time, or refused it."""


class PendingCall(Protocol):
    """A call on its way."""

    def done(self) -> bool: ...

    def answer(self) -> Any:
        """The response of a call that is done. Raises `PeerError` where there is none."""
        ...


class PeerLink(Protocol):
    """The way to one peer. Safe to use from any thread."""

    def call(self, method: str, request: Message, timeout: float, on_done: Callable[[], None]) -> PendingCall:
        """Send a request; it is done after at most `timeout` seconds, and `on_done` is called then, on any thread."""
        ...


class TransferService(Protocol):
    """What answers calls. Called on any thread."""

    def answer(self, method: str, request: Any) -> Message:
        """The response to a call of the service (`executor.transfer.methods`)."""
        ...


class TransferNetwork(Protocol):
    """How instances reach each other: what answers calls, what makes them, what moves bytes."""

    def open_transport(self, instance_id: bytes) -> Transport:
        """A transport for one instance. Raises `UnsupportedFeatureError` where its library is not installed."""
        ...

    def serve(self, service: TransferService, listen: str) -> ServedAddress:
        """Answer calls at `listen` (HOST:PORT, port 0 takes a free one). Raises `OSError` where that cannot be."""
        ...

    def link(self, address: str) -> PeerLink:
        """The way to the instance at `address`; whether it is there is seen at the first call."""
        ...


class ServedAddress(Protocol):
    """A service that is being offered."""

    address: str
    """HOST:PORT that peers use."""

    def stop(self) -> None:
        """Answer no more; returns when no call is being answered."""
        ...
