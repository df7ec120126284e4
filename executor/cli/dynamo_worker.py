"""`executor dynamo-worker`: an engine directory as a worker of an NVIDIA Dynamo cluster."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated

import typer

from engine_build.engine_dir import EngineDirectory
from executor import GuidedDecodingConfig, InstanceRole
from executor.cli import options
from executor.cli.opening import configure_logging, end_ids, one_line_errors, opened_executor, opened_tokenizer
from executor.guided_decoding import can_guide
from executor.serving.garbage import settle_garbage_collector

_CLUSTER = "The cluster"
_EVENTS = 100_000
"""KV cache events kept until they are published, 50 times a second."""


class DiscoveryBackend(StrEnum):
    FILE = "file"
    ETCD = "etcd"
    KUBERNETES = "kubernetes"
    MEM = "mem"


class RequestPlane(StrEnum):
    TCP = "tcp"
    NATS = "nats"


class EventPlane(StrEnum):
    ZMQ = "zmq"
    NATS = "nats"


def dynamo_worker(
    engine_dir: options.EngineDir,
    model_name: Annotated[
        str | None, typer.Option("--model_name", help="Shown to clients; the directory's name by default.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", help="Where Dynamo's operator put the pod, else dynamo.", rich_help_panel=_CLUSTER),
    ] = None,
    component: Annotated[
        str | None,
        typer.Option("--component", help="By the role: prefill, or backend.", rich_help_panel=_CLUSTER),
    ] = None,
    endpoint: Annotated[str, typer.Option("--endpoint", rich_help_panel=_CLUSTER)] = "generate",
    discovery_backend: Annotated[
        DiscoveryBackend,
        typer.Option(
            "--discovery_backend",
            help="file: one machine, in the directory DYN_FILE_KV names.",
            rich_help_panel=_CLUSTER,
        ),
    ] = DiscoveryBackend.ETCD,
    request_plane: Annotated[
        RequestPlane, typer.Option("--request_plane", rich_help_panel=_CLUSTER)
    ] = RequestPlane.TCP,
    event_plane: Annotated[
        EventPlane | None,
        typer.Option("--event_plane", help="zmq with file discovery, else nats.", rich_help_panel=_CLUSTER),
    ] = None,
    role: options.Role = InstanceRole.BOTH,
    transfer_listen: options.TransferListen = None,
    transfer_peer: options.TransferPeers = None,
    kv_transfer_timeout_ms: options.KvTransferTimeout = 30_000,
    transfer_tls_certificate: options.TransferTlsCertificate = None,
    transfer_tls_private_key: options.TransferTlsPrivateKey = None,
    transfer_tls_ca: options.TransferTlsCa = None,
    max_batch_size: options.MaxBatchSize = None,
    max_num_tokens: options.MaxNumTokens = None,
    kv_cache_max_tokens: options.KvCacheMaxTokens = None,
    kv_cache_free_gpu_mem_fraction: options.KvCacheFraction = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    enable_block_reuse: options.BlockReuse = True,
    capacity_scheduler_policy: options.CapacityPolicy = options.CapacityPolicyName.GUARANTEED_NO_EVICT,
    context_chunking_policy: options.ChunkingPolicy = options.ChunkingPolicyName.FIRST_COME_FIRST_SERVED,
    deterministic: options.Deterministic = False,
    num_threads: options.NumThreads = None,
    device_id: options.DeviceId = None,
    gpu_weights_percent: options.GpuWeightsPercent = 1.0,
    cuda_graph_mode: options.CudaGraphMode = None,
    cuda_graph_cache_size: options.CudaGraphCacheSize = 0,
    drain_seconds: Annotated[
        float, typer.Option("--drain_seconds", help="How long open requests may go on after SIGTERM.", min=0)
    ] = 30.0,
    log_level: options.LogLevel = options.LogLevelName.INFO,
) -> None:
    """Serve an engine directory to Dynamo's frontends and routers, until SIGTERM; open requests end first.

    Prints `worker ID is ready`, with the id that Dynamo knows it by, when it is.
    """
    try:
        importlib.import_module("dynamo.common.backend")
    except ModuleNotFoundError as error:
        typer.echo(
            f"error: dynamo-worker needs {error.name}: pip install 'inflight-executor[dynamo]', then "
            "pip install --no-deps 'ai-dynamo>=1.6,<1.7'",
            err=True,
        )
        raise typer.Exit(2) from None
    from executor.dynamo.worker import DynamoConfig, run_worker  # an optional dependency

    configure_logging(log_level)
    takes_whole_requests = role in (None, InstanceRole.BOTH)
    transceiver = options.transceiver_config(
        None if takes_whole_requests else role,
        transfer_listen,
        transfer_peer,
        kv_transfer_timeout_ms,
        transfer_tls_certificate,
        transfer_tls_private_key,
        transfer_tls_ca,
    )
    config = options.executor_config(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        kv_cache_max_tokens=kv_cache_max_tokens,
        kv_cache_free_gpu_mem_fraction=kv_cache_free_gpu_mem_fraction,
        kv_cache_dtype=kv_cache_dtype,
        enable_block_reuse=enable_block_reuse,
        capacity_scheduler_policy=capacity_scheduler_policy,
        context_chunking_policy=context_chunking_policy,
        deterministic=deterministic,
        num_threads=num_threads,
        device_id=device_id,
        gpu_weights_percent=gpu_weights_percent,
        cuda_graph_mode=cuda_graph_mode,
        cuda_graph_cache_size=cuda_graph_cache_size,
        cache_transceiver_config=transceiver,
        event_buffer_max_size=_EVENTS if enable_block_reuse else 0,
    )
    with one_line_errors():
        if can_guide(EngineDirectory.open(engine_dir)):
            config.guided_decoding_config = GuidedDecodingConfig()
    with opened_executor(engine_dir, config) as executor:
        tokenizer = opened_tokenizer(executor)
        settle_garbage_collector()
        with one_line_errors():
            run_worker(
                executor,
                end_ids(executor, tokenizer),
                DynamoConfig(
                    model_name or engine_dir.resolve().name,
                    namespace,
                    component or ("prefill" if role is InstanceRole.CONTEXT else "backend"),
                    endpoint,
                    discovery_backend,
                    request_plane,
                    event_plane,
                    drain_seconds,
                ),
                lambda worker_id: typer.echo(f"worker {worker_id} is ready"),
            )
