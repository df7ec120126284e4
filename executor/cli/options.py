"""Command line options that several commands share, and what they make."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from executor import (
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    InstanceRole,
    KvCacheConfig,
    ParallelConfig,
    SamplingConfig,
    SchedulerConfig,
)

_RUN = "How the engine runs"
_GPU = "Which GPU, and how it runs"
_SAMPLING = "How tokens are chosen"


_TRANSFERS = "Contexts from and for other instances"


class CapacityPolicyName(StrEnum):
    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ChunkingPolicyName(StrEnum):
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class LogLevelName(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


EngineDir = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="What engine-build wrote.", show_default=False)]
MaxBatchSize = Annotated[
    int | None,
    typer.Option("--max_batch_size", help="Requests in one iteration; the engine's by default.", rich_help_panel=_RUN),
]
MaxNumTokens = Annotated[
    int | None,
    typer.Option("--max_num_tokens", help="Tokens in one iteration; the engine's by default.", rich_help_panel=_RUN),
]
KvCacheMaxTokens = Annotated[
    int | None,
    typer.Option("--kv_cache_max_tokens", help="Tokens that the KV cache holds.", rich_help_panel=_RUN),
]
KvCacheFraction = Annotated[
    float | None,
    typer.Option(
        "--kv_cache_free_gpu_mem_fraction",
        help="Part of the free memory for the KV cache: 0.3 of main memory by default, 0.9 of a GPU's.",
        rich_help_panel=_RUN,
    ),
]
KvCacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv_cache_dtype",
        help="8 bits halve or quarter the KV cache: uint8 (openvino), int8, float8_e4m3fn (reference).",
        rich_help_panel=_RUN,
    ),
]
BlockReuse = Annotated[
    bool,
    typer.Option(
        "--enable_block_reuse/--disable_block_reuse",
        help="Whether requests share cached blocks of equal beginnings.",
        rich_help_panel=_RUN,
    ),
]
CapacityPolicy = Annotated[
    CapacityPolicyName,
    typer.Option("--capacity_scheduler_policy", help="Who may hold KV blocks.", rich_help_panel=_RUN),
]
ChunkingPolicy = Annotated[
    ChunkingPolicyName,
    typer.Option("--context_chunking_policy", help="How long prompts share the token budget.", rich_help_panel=_RUN),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Logits that are bit-equal whatever else is in the batch; somewhat slower.",
        rich_help_panel=_RUN,
    ),
]
NumThreads = Annotated[
    int | None, typer.Option("--num_threads", help="CPU threads; all cores by default.", rich_help_panel=_RUN)
]
DeviceId = Annotated[
    int | None,
    typer.Option("--device_id", help="Number of the GPU; the first by default.", min=0, rich_help_panel=_GPU),
]
GpuWeightsPercent = Annotated[
    float,
    typer.Option(
        "--gpu_weights_percent",
        help="Part of the weights in GPU memory, above 0 and up to 1; for engines built with --weight_streaming.",
        rich_help_panel=_GPU,
    ),
]
CudaGraphMode = Annotated[
    bool | None,
    typer.Option(
        "--cuda_graph_mode/--no_cuda_graph_mode",
        help="Whether generation steps are recorded in CUDA graphs: by default with target tensorrt.",
        show_default=False,
        rich_help_panel=_GPU,
    ),
]
CudaGraphCacheSize = Annotated[
    int,
    typer.Option(
        "--cuda_graph_cache_size",
        help="Batch sizes that are recorded, with --cuda_graph_mode; 0: all.",
        min=0,
        rich_help_panel=_GPU,
    ),
]
Role = Annotated[
    InstanceRole | None,
    typer.Option(
        "--role", help="Which requests are taken; with it contexts are exchanged.", rich_help_panel=_TRANSFERS
    ),
]
TransferListen = Annotated[
    str | None,
    typer.Option(
        "--transfer_listen",
        help="HOST:PORT where other instances ask for contexts; a free port of 127.0.0.1 by default.",
        rich_help_panel=_TRANSFERS,
    ),
]
TransferPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--transfer_peer",
        help="HOST:PORT of an instance that is asked for what it has cached of a prompt; may be repeated.",
        rich_help_panel=_TRANSFERS,
    ),
]
TransferTlsCertificate = Annotated[
    Path | None,
    typer.Option(
        "--transfer_tls_certificate",
        help="PEM file shown to other instances; with it calls between them are mutual TLS.",
        rich_help_panel=_TRANSFERS,
    ),
]
TransferTlsPrivateKey = Annotated[
    Path | None, typer.Option("--transfer_tls_private_key", help="PEM file.", rich_help_panel=_TRANSFERS)
]
TransferTlsCa = Annotated[
    Path | None,
    typer.Option(
        "--transfer_tls_ca", help="PEM file; other instances must show what it signed.", rich_help_panel=_TRANSFERS
    ),
]
KvTransferTimeout = Annotated[
    int,
    typer.Option(
        "--kv_transfer_timeout_ms",
        help="How long a context waits for whoever goes on with it.",
        min=1,
        rich_help_panel=_TRANSFERS,
    ),
]


def server_address(text: str) -> str:
    """A callback for HOST:PORT of a server: gRPC takes a port beyond the last one for another that is none of ours."""
    port = text.rpartition(":")[2]
    if port.isdecimal() and not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"{text!r} has port {port}; ports are 1 to 65535")
    return text


ServerAddress = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", callback=server_address, help="HOST:PORT of a server.", show_default=False),
]
SentTokenFile = Annotated[Path | None, typer.Option("--bearer_token_file", help="Sent to the server.")]
TlsRootCertificates = Annotated[
    Path | None, typer.Option("--tls_root_certificates", help="PEM file; with it the connection is TLS.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0, or unset: the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int | None, typer.Option("--top_k", help="Keep so many tokens; 0: all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float | None, typer.Option("--top_p", help="Keep tokens up to this probability.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option("--min_p", help="Keep tokens this likely, relative to the likeliest.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Fixes the draws.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition_penalty", help="Above 1: fewer repetitions.", rich_help_panel=_SAMPLING)
]
DEFAULT_MAX_TOKENS = 512
"""Of answers in a terminal: a model that does not find an end would go on for as long as its context is."""
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max_tokens",
        help=f"Most tokens of an answer; {DEFAULT_MAX_TOKENS} by default, or what the prompt leaves.",
        show_default=False,
    ),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends an answer; may be repeated.")]
LogLevel = Annotated[LogLevelName, typer.Option("--log_level", help="Lines on standard error.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore_eos", help="Go on after the model's end token.")]


def transceiver_config(
    role: InstanceRole | None,
    listen: str | None,
    peers: list[str] | None,
    timeout_ms: int,
    tls_certificate: Path | None,
    tls_private_key: Path | None,
    tls_ca: Path | None,
) -> CacheTransceiverConfig | None:
    """How contexts are exchanged: not at all without a role, an address or a peer."""
    if role is None and listen is None and not peers:
        return None
    config = CacheTransceiverConfig(
        role=role or InstanceRole.BOTH,
        kv_transfer_timeout_ms=timeout_ms,
        peers=peers or [],
        tls_certificate=None if tls_certificate is None else str(tls_certificate),
        tls_private_key=None if tls_private_key is None else str(tls_private_key),
        tls_ca=None if tls_ca is None else str(tls_ca),
    )
    if listen is not None:
        config.listen = listen
    return config


def executor_config(
    *,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    kv_cache_max_tokens: int | None,
    kv_cache_free_gpu_mem_fraction: float | None,
    kv_cache_dtype: str | None,
    enable_block_reuse: bool,
    capacity_scheduler_policy: CapacityPolicyName,
    context_chunking_policy: ChunkingPolicyName,
    deterministic: bool,
    num_threads: int | None,
    device_id: int | None,
    gpu_weights_percent: float,
    cuda_graph_mode: bool | None,
    cuda_graph_cache_size: int,
    max_queue_size: int | None = None,
    max_queued_tokens: int | None = None,
    iteration_table_max_rows: int = 0,
    event_buffer_max_size: int = 0,
    host_cache_size: int | None = None,
    disk_cache_size: int | None = None,
    disk_cache_dir: str | None = None,
    secondary_offload_min_priority: int | None = None,
    cache_transceiver_config: CacheTransceiverConfig | None = None,
) -> ExecutorConfig:
    """What the options say about running an engine."""
    return ExecutorConfig(
        scheduler_config=SchedulerConfig(
            CapacitySchedulerPolicy[capacity_scheduler_policy.name],
            ContextChunkingPolicy[context_chunking_policy.name],
        ),
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=enable_block_reuse,
            max_tokens=kv_cache_max_tokens,
            free_gpu_memory_fraction=kv_cache_free_gpu_mem_fraction,
            kv_cache_dtype=kv_cache_dtype,
            event_buffer_max_size=event_buffer_max_size,
            host_cache_size=host_cache_size,
            disk_cache_size=disk_cache_size,
            disk_cache_dir=disk_cache_dir,
            secondary_offload_min_priority=secondary_offload_min_priority,
        ),
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_queue_size=max_queue_size,
        max_queued_tokens=max_queued_tokens,
        deterministic=deterministic,
        num_threads=num_threads,
        parallel_config=None if device_id is None else ParallelConfig(device_ids=[device_id]),
        gpu_weights_percent=gpu_weights_percent,
        extended_runtime_perf_knob_config=ExtendedRuntimePerfKnobConfig(
            cuda_graph_mode=cuda_graph_mode, cuda_graph_cache_size=cuda_graph_cache_size
        ),
        cache_transceiver_config=cache_transceiver_config,
        iteration_table_max_rows=iteration_table_max_rows,
    )


def sampling_config(
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    repetition_penalty: float | None,
) -> SamplingConfig:
    """What the options say about choosing tokens."""
    return SamplingConfig(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
    )
