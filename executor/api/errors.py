"""Typed errors of the Executor. Servers map `code` to their protocol's status; nothing else is mapped."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """What kind of failure it is; the names are gRPC's."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    """The request can never succeed as it is."""
    UNIMPLEMENTED = "UNIMPLEMENTED"
    """The request asks for something that this build or engine does not offer."""
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    """The request is right, but not for the state this instance is in."""
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    """A queue bound is reached; the same request may succeed later."""
    UNAVAILABLE = "UNAVAILABLE"
    """Shutting down, or not started."""
    INTERNAL = "INTERNAL"
    """The engine failed on this request's batch."""


class RequestError(Exception):
    """One request cannot be served. `field` names the request's field at fault, or is empty."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequestError(RequestError, ValueError):
    """A field has a value that is wrong for this engine: names the field, the value and what would be right."""


class UnsupportedFeatureError(RequestError):
    """A field asks for something that is not offered. Never ignored silently."""

    code = ErrorCode.UNIMPLEMENTED


class WrongRoleError(RequestError):
    """The instance's role takes no requests of this type; another instance may."""

    code = ErrorCode.FAILED_PRECONDITION


class DuplicateRequestError(RequestError):
    """The request id belongs to a live request."""

    code = ErrorCode.ALREADY_EXISTS


class ReceiptNotFoundError(LookupError):
    """There is no receipt of this request (any more)."""


class QueueFullError(RequestError):
    """The queue's bound (requests or tokens) is reached."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class PinQuotaExceededError(RequestError):
    """So much of the KV cache is pinned already that this prefix does not fit in `max_pinned_fraction`."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class ExecutorShutDownError(RequestError):
    """The executor takes no requests any more."""

    code = ErrorCode.UNAVAILABLE


class EngineStepError(RequestError):
    """The engine failed on the iteration this request was part of. Others live on."""

    code = ErrorCode.INTERNAL
