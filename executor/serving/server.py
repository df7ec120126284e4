"""A whole server: the generation service, its endpoints, and how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from executor.serving.generation import GenerationService
from executor.serving.grpc_control import ControlServicer, ServedLimits
from executor.serving.grpc_inference import InferenceServicer
from executor.serving.grpc_server import GrpcConfig, GrpcServer
from executor.serving.interface import ServedExecutor
from executor.serving.progress import ProgressMonitor
from executor.serving.stats_feed import StatsFeed
from executor.text import Tokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model_name: str
    limits: ServedLimits
    end_ids: tuple[int, ...] = ()
    """The model's end tokens."""
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    slow_reader_seconds: float = 30.0
    progress_limit_seconds: float = 30.0
    drain_seconds: float = 30.0
    """How long open requests may go on after SIGTERM."""


class Server:
    """Serves an executor until it is told to stop. Make and use it on one asyncio loop."""

    def __init__(self, executor: ServedExecutor, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self.config = config
        self.generation = GenerationService(
            executor, tokenizer, end_ids=config.end_ids, slow_reader_seconds=config.slow_reader_seconds
        )
        self.stats = StatsFeed(executor)
        self.progress = ProgressMonitor(executor, limit_seconds=config.progress_limit_seconds)
        control = ControlServicer(
            self.generation, self.progress, self.stats, limits=config.limits, model_name=config.model_name
        )
        self._grpc = GrpcServer(config.grpc, InferenceServicer(self.generation), control, self.progress)

    async def start(self) -> int:
        """Listen, and return the gRPC port; raises `BindError`."""
        warning = self.config.grpc.credentials.warning(self.config.grpc.host)
        if warning is not None:
            _logger.warning(warning)
        return await self._grpc.start()

    async def stop(self) -> None:
        """Take no new requests, let the open ones end for `drain_seconds`, cancel the rest, close."""
        await self._grpc.begin_drain()
        await self.generation.drain(self.config.drain_seconds)
        await self._grpc.stop()
        self.generation.close()
        self.stats.close()


async def serve_until_signal(server: Server, on_ready: Callable[[int], None]) -> None:
    """Start, call `on_ready` with the port, and drain at SIGTERM or SIGINT; a second signal stops at once.

    Raises:
        BindError: the server cannot listen.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    port = await server.start()

    def on_signal(received: signal.Signals) -> None:
        if stopping.is_set():
            server.generation.close()
            return
        _logger.info("%s: draining, %d requests open", received.name, server.generation.num_live_requests)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    on_ready(port)
    await stopping.wait()
    await server.stop()
    _logger.info("stopped")
