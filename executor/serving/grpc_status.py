"""Typed errors as gRPC statuses with google.rpc details."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from executor.api.errors import ErrorCode, RequestError

_STATUS: dict[ErrorCode, grpc.StatusCode] = {code: grpc.StatusCode[code.value] for code in ErrorCode}

_RETRY_AFTER_SECONDS = 1
"""What clients are told to wait when a bound is reached. Queues drain in seconds or not at all."""

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC clients look for a google.rpc.Status."""


class CallRefusedError(Exception):
    """A call ends with a status that no error of a request stands for."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> None:
    """End a call with the error's status. Never returns: raises what grpc.aio raises for an aborted call."""
    status = _STATUS[error.code]
    details = status_details(error)
    await context.abort(status, error.message, ((DETAILS_KEY, details.SerializeToString()),))


def status_details(error: RequestError) -> status_pb2.Status:
    """The error as google.rpc.Status: BadRequest for a field at fault, RetryInfo where a retry may help."""
    status = status_pb2.Status(code=_STATUS[error.code].value[0], message=error.message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.code in (ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE):
        delay = duration_pb2.Duration(seconds=_RETRY_AFTER_SECONDS)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _packed(detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
