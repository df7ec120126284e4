"""`executor serve`: an engine directory as a gRPC service."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from engine_build.engine_dir import EngineDirectory
from executor import GuidedDecodingConfig
from executor.cli import options
from executor.cli.opening import configure_logging, end_ids, one_line_errors, opened_executor, opened_tokenizer
from executor.guided_decoding import can_guide
from executor.serving.addresses import check_can_listen, is_http_url
from executor.serving.credentials import Credentials
from executor.serving.garbage import settle_garbage_collector
from executor.serving.grpc_server import GrpcConfig
from executor.serving.server import Ports, Server, ServerConfig, serve_until_signal

if TYPE_CHECKING:
    from executor.serving.http.server import HttpConfig

_LISTEN = "Where, and for whom"
_LIMITS = "Limits"
_TIERS = "KV cache below the pool"
_MOST_KEPT = 100_000_000
"""Rows or events: more would not fit the memory of any machine."""


def _http_url(text: str | None) -> str | None:
    if text is not None and not is_http_url(text):
        raise typer.BadParameter(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
    return text


def serve(
    engine_dir: options.EngineDir,
    host: Annotated[str, typer.Option("--host", rich_help_panel=_LISTEN)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535, rich_help_panel=_LISTEN)
    ] = 50051,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http_port",
            help="Also serve OpenAI-compatible HTTP and /metrics here; 0 takes a free port.",
            min=0,
            max=65535,
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics_port",
            help="Serve /metrics alone here, with or without --http_port; 0 takes a free port.",
            min=0,
            max=65535,
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model_name", help="Shown to clients; the directory's name by default.")
    ] = None,
    max_batch_size: options.MaxBatchSize = None,
    max_num_tokens: options.MaxNumTokens = None,
    kv_cache_max_tokens: options.KvCacheMaxTokens = None,
    kv_cache_free_gpu_mem_fraction: options.KvCacheFraction = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    enable_block_reuse: options.BlockReuse = True,
    host_cache_size: Annotated[
        int | None,
        typer.Option(
            "--host_cache_size", help="Bytes of main memory for KV blocks that leave the pool.", rich_help_panel=_TIERS
        ),
    ] = None,
    disk_cache_size: Annotated[
        int | None,
        typer.Option(
            "--disk_cache_size", help="Bytes of a file for KV blocks that leave those.", rich_help_panel=_TIERS
        ),
    ] = None,
    disk_cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--disk_cache_dir", help="Where that file is; removed when the server ends.", rich_help_panel=_TIERS
        ),
    ] = None,
    secondary_offload_min_priority: Annotated[
        int | None,
        typer.Option(
            "--secondary_offload_min_priority",
            help="Retention priority below which blocks are dropped instead; 30 by default.",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    capacity_scheduler_policy: options.CapacityPolicy = options.CapacityPolicyName.GUARANTEED_NO_EVICT,
    context_chunking_policy: options.ChunkingPolicy = options.ChunkingPolicyName.FIRST_COME_FIRST_SERVED,
    deterministic: options.Deterministic = False,
    num_threads: options.NumThreads = None,
    device_id: options.DeviceId = None,
    gpu_weights_percent: options.GpuWeightsPercent = 1.0,
    cuda_graph_mode: options.CudaGraphMode = None,
    cuda_graph_cache_size: options.CudaGraphCacheSize = 0,
    role: options.Role = None,
    transfer_listen: options.TransferListen = None,
    transfer_peer: options.TransferPeers = None,
    kv_transfer_timeout_ms: options.KvTransferTimeout = 30_000,
    transfer_tls_certificate: options.TransferTlsCertificate = None,
    transfer_tls_private_key: options.TransferTlsPrivateKey = None,
    transfer_tls_ca: options.TransferTlsCa = None,
    max_queue_size: Annotated[
        int | None, typer.Option("--max_queue_size", help="Requests that may wait.", rich_help_panel=_LIMITS)
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option("--max_queued_tokens", help="Prompt tokens that may wait.", rich_help_panel=_LIMITS)
    ] = None,
    max_message_bytes: Annotated[
        int, typer.Option("--max_message_bytes", help="Largest request message.", min=1024, rich_help_panel=_LIMITS)
    ] = 4 << 20,
    slow_reader_seconds: Annotated[
        float,
        typer.Option(
            "--slow_reader_seconds",
            help="A client that reads nothing for so long loses its request.",
            min=0.1,
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    progress_limit_seconds: Annotated[
        float,
        typer.Option(
            "--progress_limit_seconds",
            help="Unhealthy when there is work and no iteration finished for so long.",
            min=0.1,
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain_seconds", help="How long open requests may go on after SIGTERM.", min=0, rich_help_panel=_LIMITS
        ),
    ] = 30.0,
    tls_certificate: Annotated[
        Path | None, typer.Option("--tls_certificate", help="PEM file; with it TLS only.", rich_help_panel=_LISTEN)
    ] = None,
    tls_private_key: Annotated[
        Path | None, typer.Option("--tls_private_key", help="PEM file.", rich_help_panel=_LISTEN)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls_client_ca", help="PEM file; clients must show a certificate it signed.", rich_help_panel=_LISTEN
        ),
    ] = None,
    bearer_token_file: Annotated[
        Path | None,
        typer.Option("--bearer_token_file", help="Clients must send the token in it.", rich_help_panel=_LISTEN),
    ] = None,
    iteration_table_max_rows: Annotated[
        int,
        typer.Option("--iteration_table_max_rows", help="Rows kept for Control.IterationTable.", min=0, max=_MOST_KEPT),
    ] = 0,
    event_buffer_max_size: Annotated[
        int,
        typer.Option(
            "--event_buffer_max_size", help="KV cache events kept for Control.KvEvents.", min=0, max=_MOST_KEPT
        ),
    ] = 0,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp_endpoint",
            callback=_http_url,
            help="OpenTelemetry collector for a span of each request: http://HOST:PORT.",
        ),
    ] = None,
    log_level: options.LogLevel = options.LogLevelName.INFO,
    log_json: Annotated[bool, typer.Option("--log_json", help="Log lines as JSON objects.")] = False,
) -> None:
    """Serve an engine directory over gRPC, and over HTTP if asked. Prints `listening on HOST:PORT` when it is ready."""
    configure_logging(log_level, as_json=log_json)
    config = options.executor_config(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        kv_cache_max_tokens=kv_cache_max_tokens,
        kv_cache_free_gpu_mem_fraction=kv_cache_free_gpu_mem_fraction,
        kv_cache_dtype=kv_cache_dtype,
        enable_block_reuse=enable_block_reuse,
        host_cache_size=host_cache_size,
        disk_cache_size=disk_cache_size,
        disk_cache_dir=None if disk_cache_dir is None else str(disk_cache_dir),
        secondary_offload_min_priority=secondary_offload_min_priority,
        cache_transceiver_config=options.transceiver_config(
            role,
            transfer_listen,
            transfer_peer,
            kv_transfer_timeout_ms,
            transfer_tls_certificate,
            transfer_tls_private_key,
            transfer_tls_ca,
        ),
        capacity_scheduler_policy=capacity_scheduler_policy,
        context_chunking_policy=context_chunking_policy,
        deterministic=deterministic,
        num_threads=num_threads,
        device_id=device_id,
        gpu_weights_percent=gpu_weights_percent,
        cuda_graph_mode=cuda_graph_mode,
        cuda_graph_cache_size=cuda_graph_cache_size,
        max_queue_size=max_queue_size,
        max_queued_tokens=max_queued_tokens,
        iteration_table_max_rows=iteration_table_max_rows,
        event_buffer_max_size=event_buffer_max_size,
    )
    with one_line_errors():
        credentials = Credentials.load(
            certificate=tls_certificate,
            private_key=tls_private_key,
            client_ca=tls_client_ca,
            bearer_token_file=bearer_token_file,
        )
        if can_guide(EngineDirectory.open(engine_dir)):
            config.guided_decoding_config = GuidedDecodingConfig()
        check_can_listen(host, *(each for each in (port, http_port, metrics_port) if each is not None))
    if http_port is not None:
        _require("--http_port", "executor.serving.http.app", "http")
    if metrics_port is not None:
        _require("--metrics_port", "executor.serving.http.metrics", "http")
    if otlp_endpoint is not None:
        _require("--otlp_endpoint", "executor.serving.tracing", "tracing")
    with opened_executor(engine_dir, config) as executor:
        tokenizer = opened_tokenizer(executor)
        server_config = ServerConfig(
            model_name=model_name or engine_dir.resolve().name,
            end_ids=end_ids(executor, tokenizer),
            grpc=GrpcConfig(host, port, max_message_bytes, credentials),
            http=None if http_port is None else http_config(host, http_port, max_message_bytes, credentials),
            metrics=None if metrics_port is None else http_config(host, metrics_port, max_message_bytes, credentials),
            otlp_endpoint=otlp_endpoint,
            slow_reader_seconds=slow_reader_seconds,
            progress_limit_seconds=progress_limit_seconds,
            drain_seconds=drain_seconds,
        )

        async def run() -> None:
            server = Server(executor, tokenizer, server_config)
            await serve_until_signal(server, on_ready)

        def on_ready(ports: Ports) -> None:
            typer.echo(f"listening on {host}:{ports.grpc}")
            if ports.http is not None:
                typer.echo(f"http on {host}:{ports.http}")
            if executor.transfer_address is not None:
                typer.echo(f"transfers on {executor.transfer_address}")
            if ports.metrics is not None:
                typer.echo(f"metrics on {host}:{ports.metrics}")

        settle_garbage_collector()
        uvloop.run(run())


def http_config(host: str, port: int, max_body_bytes: int, credentials: Credentials) -> HttpConfig:
    """Where HTTP is served."""
    from executor.serving.http.server import HttpConfig  # an optional dependency

    return HttpConfig(host, port, max_body_bytes, credentials)


def _require(flag: str, module: str, extra: str) -> None:
    """One line and exit code 2 where the libraries that a flag needs are not installed."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        typer.echo(f"error: {flag} needs {error.name}: pip install 'inflight-executor[{extra}]'", err=True)
        raise typer.Exit(2) from None
