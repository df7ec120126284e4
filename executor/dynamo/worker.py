"""Runs an executor as a Dynamo worker until it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from dynamo.common.backend import Worker, WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace

from executor.api.errors import ExecutorShutDownError
from executor.api.role import InstanceRole
from executor.dynamo.engine import ExecutorEngine
from executor.dynamo.model_directory import model_directory
from executor.executor import Executor

_MODES = {
    InstanceRole.CONTEXT: DisaggregationMode.PREFILL,
    InstanceRole.GENERATION: DisaggregationMode.DECODE,
    InstanceRole.BOTH: DisaggregationMode.AGGREGATED,
}


@dataclass(frozen=True, slots=True)
class DynamoConfig:
    """Where and how a worker meets the others of its cluster. Names are those of Dynamo's own options."""

    model_name: str
    namespace: str | None = None
    """None: what Dynamo's operator says in the environment, or `dynamo`."""
    component: str = "backend"
    """Context and generation workers of one model have components of their own."""
    endpoint: str = "generate"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    """None: as the discovery backend suggests."""
    drain_seconds: float = 30.0
    """How long open requests may go on after SIGTERM."""


def run_worker(
    executor: Executor, end_ids: Sequence[int], config: DynamoConfig, on_ready: Callable[[int], None]
) -> None:
    """Register, serve, and drain at SIGTERM or SIGINT, or when the executor breaks.

    Args:
        executor: outlives the worker; its role is the worker's.
        end_ids: the model's end tokens.
        config: where the cluster is.
        on_ready: called with the worker's id right before it is found by others.

    Raises:
        ExecutorShutDownError: the executor stopped by itself; its log says why.
        UnsupportedFeatureError: the engine directory has no tokenizer.
        Exception: the discovery backend cannot be reached, as Dynamo words it.
    """
    directory = str(model_directory(executor.manifest, executor.spec.max_seq_len))
    role = executor.role
    num_blocks = executor.pool_size.num_blocks
    is_broken = False

    def stop() -> None:
        nonlocal is_broken
        if not is_broken:
            is_broken = True
            signal.raise_signal(signal.SIGTERM)  # as an operator would: Dynamo's worker unregisters, and ends

    engine = ExecutorEngine(
        executor, end_ids, directory, config.model_name, num_blocks, role, config.drain_seconds, on_ready, stop
    )
    worker_config = WorkerConfig(
        namespace=config.namespace or get_worker_namespace(),
        component=config.component,
        endpoint=config.endpoint,
        model_name=directory,
        served_model_name=config.model_name,
        discovery_backend=config.discovery_backend,
        request_plane=config.request_plane,
        event_plane=config.event_plane,
        disaggregation_mode=_MODES[role],
    )
    uvloop.run(Worker(engine, worker_config).run())
    if is_broken:
        raise ExecutorShutDownError("the executor stopped by itself, and so did its worker")
