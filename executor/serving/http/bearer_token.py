"""Bearer tokens over HTTP."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from executor.serving.credentials import is_authorized
from executor.serving.http.errors import plain_error

_OPEN_TO_ALL = ("/health",)


class BearerTokenMiddleware:
    """Answers 401 to requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_TO_ALL:
            header = dict(scope["headers"]).get(b"authorization")
            if not is_authorized(header, self._token):
                response = plain_error(401, "send the header 'Authorization: Bearer <token>'", "invalid_api_key")
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
