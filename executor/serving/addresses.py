"""Addresses as people give them: checked before anything slow is done."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from executor.serving.errors import BindError


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address of this machine; port 0 takes a free one.

    Raises:
        BindError: the address is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def check_can_listen(host: str, *ports: int) -> None:
    """Refuse now what a server would refuse once its engine is loaded, though a port may still be taken until then.

    Raises:
        BindError: one of the addresses is taken, or given twice, or not this machine's.
    """
    bound: list[socket.socket] = []
    try:
        for port in ports:
            bound.append(listening_socket(host, port))
            bound[-1].listen(1)  # Linux lets two sockets be bound to an address with SO_REUSEADDR until one listens
    except OSError as error:
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    finally:
        for each in bound:
            each.close()


def is_http_url(text: str) -> bool:
    """Whether it is `http://HOST:PORT` or `https://HOST:PORT`."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is none
        return False
