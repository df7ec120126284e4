"""Typed errors as HTTP statuses with OpenAI's error object."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from executor.api.errors import ErrorCode, RequestError

_STATUSES = {
    ErrorCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    ErrorCode.UNIMPLEMENTED: (400, "invalid_request_error", "unsupported_parameter"),
    ErrorCode.FAILED_PRECONDITION: (400, "invalid_request_error", "failed_precondition"),
    ErrorCode.ALREADY_EXISTS: (409, "invalid_request_error", "duplicate_request_id"),
    ErrorCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "queue_full"),
    ErrorCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    ErrorCode.INTERNAL: (500, "server_error", "engine_failure"),
}
_RETRY = {ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE}


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object; `param` is the field at fault."""
    _, kind, code = _STATUSES[error.code]
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


def error_response(error: RequestError) -> JSONResponse:
    status, _, _ = _STATUSES[error.code]
    headers = {"retry-after": "1"} if error.code in _RETRY else None
    return JSONResponse(error_body(error), status, headers)


def plain_error(status: int, message: str, code: str) -> JSONResponse:
    """An error that is not a request's: no such path, no credentials."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers)
