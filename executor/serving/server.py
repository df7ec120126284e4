"""A whole server: the generation service, its endpoints, and how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from executor.serving.generation import GenerationService
from executor.serving.grpc_control import ControlServicer
from executor.serving.grpc_inference import InferenceServicer
from executor.serving.grpc_server import GrpcConfig, GrpcServer
from executor.serving.interface import ServedExecutor
from executor.serving.kv_event_feed import KvEventFeed
from executor.serving.progress import ProgressMonitor
from executor.serving.request_log import RequestLog
from executor.serving.request_record import RequestObserver
from executor.serving.stats_feed import StatsFeed
from executor.text import Tokenizer

if TYPE_CHECKING:
    from executor.serving.http.server import HttpConfig, HttpServer
    from executor.serving.tracing import RequestTracer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model_name: str
    end_ids: tuple[int, ...] = ()
    """The model's end tokens."""
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    http: HttpConfig | None = None
    """OpenAI's API, and metrics; `None`: none. Needs the extra `http`."""
    metrics: HttpConfig | None = None
    """Metrics alone, on an address of their own; `None`: none. Needs the extra `http`."""
    otlp_endpoint: str | None = None
    """Collector of OpenTelemetry spans; `None`: none are made. Needs the extra `tracing`."""
    slow_reader_seconds: float = 30.0
    progress_limit_seconds: float = 30.0
    drain_seconds: float = 30.0
    """How long open requests may go on after SIGTERM."""


class Ports(NamedTuple):
    """Where a server listens."""

    grpc: int
    http: int | None
    metrics: int | None


class Server:
    """Serves an executor until it is told to stop. Make and use it on one asyncio loop."""

    def __init__(self, executor: ServedExecutor, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self.config = config
        self.stats = StatsFeed(executor)
        self.progress = ProgressMonitor(executor, limit_seconds=config.progress_limit_seconds)
        observers: list[RequestObserver] = [RequestLog()]
        if config.http is not None or config.metrics is not None:
            from executor.serving.metrics import Metrics  # an optional dependency, as below

            metrics = Metrics(self.stats, executor.get_transfer_stats, model_name=config.model_name)
            observers.append(metrics)
        self._tracer: RequestTracer | None = None
        if config.otlp_endpoint is not None:
            from executor.serving.tracing import RequestTracer, otlp_provider

            self._tracer = RequestTracer(otlp_provider(config.otlp_endpoint, config.model_name))
            observers.append(self._tracer)
        self.generation = GenerationService(
            executor,
            tokenizer,
            end_ids=config.end_ids,
            slow_reader_seconds=config.slow_reader_seconds,
            observers=observers,
        )
        events = executor.get_kv_cache_event_manager()
        self._kv_events = None if events is None else KvEventFeed(events)
        control = ControlServicer(
            self.generation,
            self.progress,
            self.stats,
            self._kv_events,
            model_name=config.model_name,
        )
        self._grpc = GrpcServer(config.grpc, InferenceServicer(self.generation), control, self.progress)
        self._http: HttpServer | None = None
        if config.http is not None:
            from executor.serving.http.app import HttpApi
            from executor.serving.http.server import HttpServer

            api = HttpApi(
                self.generation,
                self.progress,
                metrics,
                model_name=config.model_name,
                max_body_bytes=config.http.max_body_bytes,
            )
            self._http = HttpServer(api.app(config.http.credentials.bearer_token), config.http)
        self._metrics: HttpServer | None = None
        if config.metrics is not None:
            from executor.serving.http.metrics import metrics_app
            from executor.serving.http.server import HttpServer

            app = metrics_app(metrics, config.metrics.credentials.bearer_token)
            self._metrics = HttpServer(app, config.metrics)

    async def start(self) -> Ports:
        """Listen, and return the ports; raises `BindError`."""
        for endpoint in (self.config.grpc, self.config.http, self.config.metrics):
            warning = None if endpoint is None else endpoint.credentials.warning(endpoint.host)
            if warning is not None:
                _logger.warning(warning)
        http = None if self._http is None else await self._http.start()
        metrics = None if self._metrics is None else await self._metrics.start()
        return Ports(await self._grpc.start(), http, metrics)

    async def stop(self) -> None:
        """Take no new requests, let the open ones end for `drain_seconds`, cancel the rest, close."""
        await self._grpc.begin_drain()
        await self.generation.drain(self.config.drain_seconds)
        await self._grpc.stop()
        if self._http is not None:
            await self._http.stop()
        if self._metrics is not None:
            await self._metrics.stop()
        self.generation.close()
        self.stats.close()
        if self._kv_events is not None:
            self._kv_events.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


async def serve_until_signal(server: Server, on_ready: Callable[[Ports], None]) -> None:
    """Start, call `on_ready` with the ports, and drain at SIGTERM or SIGINT. A second signal ends open requests.

    Raises:
        BindError: the server cannot listen.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    ports = await server.start()

    def on_signal(received: signal.Signals) -> None:
        num_open = server.generation.num_live_requests
        if stopping.is_set():
            _logger.warning("%s again: ending %d open requests now", received.name, num_open)
            server.generation.close()
            return
        _logger.info("%s: draining, %d requests open", received.name, num_open)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    on_ready(ports)
    await stopping.wait()
    await server.stop()
    _logger.info("stopped")
