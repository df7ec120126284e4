"""Who may talk to a server, and whether others can listen: TLS, mutual TLS, bearer tokens."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
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

    certificate: Path | None = None
    """PEM chain the server shows; with it the endpoints speak TLS only."""
    private_key: Path | None = None
    client_ca: Path | None = None
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
        """Check that the files can be used, and read the token.

        Raises:
            CredentialsError: a file cannot be read or is not what it should be, the token is empty, or one of
                certificate and key is missing.
        """
        if (certificate is None) != (private_key is None):
            raise CredentialsError("a TLS certificate and its private key go together; one of them is missing")
        if client_ca is not None and certificate is None:
            raise CredentialsError("client certificates are only asked for over TLS; give a certificate and key too")
        credentials = cls(certificate, private_key, client_ca, _read_token(bearer_token_file))
        credentials.ssl_context()
        return credentials

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """For a secure gRPC port; `None`: plaintext."""
        if self.certificate is None or self.private_key is None:
            return None
        return grpc.ssl_server_credentials(
            [(_read(self.private_key), _read(self.certificate))],
            root_certificates=None if self.client_ca is None else _read(self.client_ca),
            require_client_auth=self.client_ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; `None`: plaintext.

        Raises:
            CredentialsError: a file cannot be read, or certificate and key do not fit.
        """
        if self.certificate is None:
            return None
        for path in (self.certificate, self.private_key, self.client_ca):
            if path is not None:
                _read(path)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except ssl.SSLError as error:
            raise CredentialsError(
                f"{self.certificate} and {self.private_key} are not a PEM certificate and its key{_reason(error)}"
            ) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise CredentialsError(f"{self.client_ca} holds no PEM certificates{_reason(error)}") from error
        return context

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


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, where it says something: not of a file without PEM in it."""
    return "" if error.reason is None else f": {error.reason}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = _read(path).decode("ascii", "replace").strip()
    if not token or not token.isprintable() or not token.isascii():
        raise CredentialsError(f"{path} does not hold a bearer token: one line of printable ASCII")
    return token
