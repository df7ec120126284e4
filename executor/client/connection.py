"""How a client connects: address, TLS, bearer token."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Credentials of a connection. Empty: plaintext and no token."""

    root_certificates: bytes | None = None
    """PEM; with them the connection is TLS, and the server's certificate must be signed by one of these."""
    certificate_chain: bytes | None = None
    """PEM; shown to servers that ask for a client certificate."""
    private_key: bytes | None = field(default=None, repr=False)
    bearer_token: str | None = field(default=None, repr=False)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a secure channel; `None`: plaintext."""
        if self.root_certificates is None:
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)

    def metadata(self) -> Metadata:
        """Sent with every call."""
        return () if self.bearer_token is None else (("authorization", f"Bearer {self.bearer_token}"),)
