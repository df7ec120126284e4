"""The gRPC endpoint: services, health, reflection, credentials, draining."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from executor.serving.credentials import BearerTokenInterceptor, Credentials
from executor.serving.errors import BindError
from executor.serving.grpc_control import ControlServicer
from executor.serving.grpc_handlers import service_handler
from executor.serving.grpc_inference import InferenceServicer
from executor.serving.progress import ProgressMonitor
from protos.inflight.v1 import control_pb2, inference_pb2

_logger = logging.getLogger(__name__)

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
_SERVED_NAMES = ("", _INFERENCE.full_name, _CONTROL.full_name)
_HEALTH_INTERVAL_SECONDS = 0.5
_KEEPALIVE_MS = 30_000


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    host: str = "127.0.0.1"
    port: int = 50051
    """0 takes a free one."""
    max_message_bytes: int = 4 << 20
    """Bound on a request message; larger ones end with RESOURCE_EXHAUSTED."""
    credentials: Credentials = Credentials()


class GrpcServer:
    """Serves `inflight.v1`, the standard health service and reflection on one address."""

    def __init__(
        self, config: GrpcConfig, inference: InferenceServicer, control: ControlServicer, progress: ProgressMonitor
    ) -> None:
        self._config = config
        self._progress = progress
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        token = config.credentials.bearer_token
        self._server = grpc.aio.server(
            interceptors=[] if token is None else [BearerTokenInterceptor(token)],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # a client that vanished without a word is noticed
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent partner
            ],
        )
        self._server.add_generic_rpc_handlers(
            (service_handler(_INFERENCE, inference), service_handler(_CONTROL, control))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_INFERENCE.full_name, _CONTROL.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is taken, or not this machine's.
        """
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        credentials = self._config.credentials.grpc_credentials()
        try:
            port: int = (
                self._server.add_insecure_port(address)
                if credentials is None
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: it is taken, or not an address of this machine") from error
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_progress())
        return port

    async def begin_drain(self) -> None:
        """Report NOT_SERVING from now on; open calls go on."""
        if self._watch is not None:
            self._watch.cancel()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """Close the endpoint; calls that are still open are cancelled after a moment for their last messages."""
        await self._server.stop(grace=1.0)

    async def _set_health(self, status: int) -> None:
        for name in _SERVED_NAMES:
            await self._health.set(name, status)

    async def _watch_progress(self) -> None:
        """Keep the health service in step with the executor's progress."""
        was_serving = True
        while True:
            is_stalled = self._progress.is_stalled
            is_serving = not is_stalled and not self._progress.is_paused
            if is_serving != was_serving:
                reason = f"no iteration in {self._progress.limit_seconds:g} s, with work" if is_stalled else "paused"
                _logger.warning("SERVING again" if is_serving else f"NOT_SERVING: {reason}")
                serving = health_pb2.HealthCheckResponse
                await self._set_health(serving.SERVING if is_serving else serving.NOT_SERVING)
                was_serving = is_serving
            await asyncio.sleep(_HEALTH_INTERVAL_SECONDS)
