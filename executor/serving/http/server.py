"""The HTTP endpoint on uvicorn, inside the server's own asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from executor.serving.addresses import listening_socket
from executor.serving.credentials import Credentials


@dataclass(frozen=True, slots=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    max_body_bytes: int = 4 << 20
    credentials: Credentials = Credentials()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: the server that it is part of has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application on one address."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._config = config
        tls = config.credentials.ssl_context()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_context_factory=None if tls is None else lambda _config, _default: tls,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is taken, or not this machine's.
        """
        listening = listening_socket(self._config.host, self._config.port)
        port: int = listening.getsockname()[1]
        self._serving = asyncio.get_running_loop().create_task(self._uvicorn.serve([listening]))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(0.001)
        return port

    async def stop(self) -> None:
        """Close the endpoint; answers that are still open get a second."""
        if self._serving is not None:
            self._uvicorn.should_exit = True
            await self._serving
