"""Who may talk to a server, and whether others can listen: TLS, mutual TLS, bearer tokens."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

_OPEN_TO_ALL = "/grpc.health.v1.Health/"
"""Load balancers ask for health without credentials."""


class CredentialsError(Exception):
    """A certificate, key or token file cannot be used: names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the server shows and what it asks for. Empty: plaintext, and no questions."""

    certificate: bytes | None = None
    """PEM chain the server shows; with it the endpoint speaks TLS only."""
    private_key: bytes | None = field(default=None, repr=False)
    client_ca: bytes | None = None
    """PEM roots; with them clients must show a certificate that one of these signed."""
    bearer_token: str | None = field(default=None, repr=False)
    """With it every call but health checks needs `authorization: Bearer <token>`."""

    @classmethod
    def load(
        cls,
        *,
        certificate: Path | None = None,
        private_key: Path | None = None,
        client_ca: Path | None = None,
        bearer_token_file: Path | None = None,
    ) -> Credentials:
        """Read the files.

        Raises:
            CredentialsError: a file cannot be read, the token is empty, or one of certificate and key is missing.
        """
        if (certificate is None) != (private_key is None):
            raise CredentialsError("a TLS certificate and its private key go together; one of them is missing")
        if client_ca is not None and certificate is None:
            raise CredentialsError("client certificates are only asked for over TLS; give a certificate and key too")
        token = _read(bearer_token_file)
        text = None if token is None else token.decode("ascii", "replace").strip()
        if text is not None and (not text or not text.isprintable() or not text.isascii()):
            raise CredentialsError(f"{bearer_token_file} does not hold a bearer token: one line of printable ASCII")
        return cls(_read(certificate), _read(private_key), _read(client_ca), text)

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """For a secure port; `None`: plaintext."""
        if self.certificate is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.private_key, self.certificate)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )

    def warning(self, host: str) -> str | None:
        """What is risky about listening on `host` with these credentials, if anything."""
        if is_loopback(host):
            return None
        missing = []
        if self.certificate is None:
            missing.append("without TLS")
        if self.bearer_token is None and self.client_ca is None:
            missing.append("without asking clients who they are")
        return f"listening on {host}, beyond this machine, {' and '.join(missing)}" if missing else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_authorized(header: str | bytes | None, token: str) -> bool:
    """Whether an `authorization` header carries the token. Takes the same time wherever they differ."""
    if header is None:
        return False
    given = header.encode("utf-8", "surrogateescape") if isinstance(header, str) else header
    return hmac.compare_digest(given, f"Bearer {token}".encode())


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls without the token as UNAUTHENTICATED, health checks excepted."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return handler
        for key, value in handler_call_details.invocation_metadata:
            if key == "authorization" and is_authorized(value, self._token):
                return handler
        if handler.request_streaming:
            bind = grpc.stream_stream_rpc_method_handler
        elif handler.response_streaming:
            bind = grpc.unary_stream_rpc_method_handler
        else:
            bind = grpc.unary_unary_rpc_method_handler
        return bind(_refuse)


async def _refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the metadata 'authorization: Bearer <token>'")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error
