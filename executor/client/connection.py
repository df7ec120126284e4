"""How a client connects: address, TLS, bearer token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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

    @classmethod
    def from_files(
        cls, root_certificates: Path | None = None, bearer_token_file: Path | None = None
    ) -> ConnectionOptions:
        """Read PEM roots, and a token, where there are files of them. Raises `OSError` where one cannot be read."""
        return cls(
            root_certificates=None if root_certificates is None else root_certificates.read_bytes(),
            bearer_token=None if bearer_token_file is None else bearer_token_file.read_text().strip(),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a secure channel; `None`: plaintext."""
        if self.root_certificates is None:
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)

    def metadata(self) -> Metadata:
        """Sent with every call."""
        return () if self.bearer_token is None else (("authorization", f"Bearer {self.bearer_token}"),)
