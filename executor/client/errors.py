"""gRPC statuses as the typed errors that the Executor raises in process."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

from executor.api.errors import (
    DuplicateRequestError,
    EngineStepError,
    ErrorCode,
    ExecutorShutDownError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    UnsupportedFeatureError,
    WrongRoleError,
)

_DETAILS_KEY = "grpc-status-details-bin"

_ERRORS: dict[str, type[RequestError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidRequestError,
    ErrorCode.UNIMPLEMENTED: UnsupportedFeatureError,
    ErrorCode.FAILED_PRECONDITION: WrongRoleError,
    ErrorCode.ALREADY_EXISTS: DuplicateRequestError,
    ErrorCode.RESOURCE_EXHAUSTED: QueueFullError,
    ErrorCode.UNAVAILABLE: ExecutorShutDownError,
    ErrorCode.INTERNAL: EngineStepError,
}


class CallError(Exception):
    """A call failed for a reason that is not the request's: `status` says which (deadline, credentials, ...)."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message


def typed_error(status: grpc.StatusCode, message: str | None, metadata: object) -> RequestError | CallError:
    """The error that a failed call stands for, with the field at fault where the server named one."""
    kind, field = _ERRORS.get(status.name), _field(metadata)
    if kind is None or (kind is WrongRoleError and not field):  # calls that are no requests have preconditions, too
        return CallError(status, message or "")
    return kind(message or status.name, field=field)


def _field(metadata: object) -> str:
    pairs = metadata if isinstance(metadata, grpc.aio.Metadata | tuple | list) else ()
    for key, value in pairs:
        if key == _DETAILS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                bad_request = error_details_pb2.BadRequest()
                if detail.Unpack(bad_request) and bad_request.field_violations:
                    return str(bad_request.field_violations[0].field)
    return ""
