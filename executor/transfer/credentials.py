"""Who may call whom: instances show each other certificates that one authority has signed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from executor.api.errors import InvalidRequestError
from executor.api.kv_cache_config import CacheTransceiverConfig

_FIELDS = ("tls_certificate", "tls_private_key", "tls_ca")


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Of one instance, PEM."""

    certificate: bytes
    """Chain; shown as server and as client."""
    private_key: bytes
    ca: bytes
    """Roots; whoever shows nothing that one of these has signed is no peer."""

    @classmethod
    def of(cls, config: CacheTransceiverConfig) -> PeerCredentials | None:
        """Read and check the files of a configuration; `None` where it names none.

        Raises:
            InvalidRequestError: a file is missing or is not what it should be; names the field.
        """
        paths = {name: getattr(config, name) for name in _FIELDS}
        if not any(paths.values()):
            return None
        for name, path in paths.items():
            if path is None:
                raise _wrong(name, f"is not set; {', '.join(_FIELDS)} go together")
        contents = [_read(name, Path(path)) for name, path in paths.items()]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a callback OpenSSL would ask at the terminal, and wait; gRPC cannot decrypt keys either.
            context.load_cert_chain(paths["tls_certificate"], paths["tls_private_key"], _no_passphrase)
        except ssl.SSLError as error:
            raise _wrong("tls_certificate", "and tls_private_key are no PEM certificate and its key") from error
        try:
            context.load_verify_locations(paths["tls_ca"])
        except ssl.SSLError as error:
            raise _wrong("tls_ca", f"is {paths['tls_ca']}, which holds no PEM certificates") from error
        return cls(*contents)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.private_key, self.certificate)], self.ca, require_client_auth=True)

    def of_client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.private_key, self.certificate)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _wrong(name, f"is {path}, which cannot be read: {error.strerror}") from error


def _no_passphrase() -> str:
    raise _wrong("tls_private_key", "is encrypted; it must be a key without a passphrase")


def _wrong(name: str, what: str) -> InvalidRequestError:
    field = f"cache_transceiver_config.{name}"
    return InvalidRequestError(f"{field} {what}", field=field)
