"""How an Executor runs. Names, order and defaults follow `tensorrt_llm.bindings.executor`, except where a docstring
says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from executor.api.request import AdditionalModelOutput, EagleConfig, LogitsPostProcessor, LookaheadDecodingConfig
from executor.api.support import refused

_ONE_DEVICE = "one process drives one device"
_GPU_ONLY = "it tunes GPU kernels that this executor does not have"


class ModelType(IntEnum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(IntEnum):
    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(IntEnum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(IntEnum):
    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(IntEnum):
    MPI = 0


class CommunicationMode(IntEnum):
    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(slots=True)
class DynamicBatchConfig:
    enable_batch_size_tuning: bool = False
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = 128


@dataclass(slots=True)
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    """`None`: first come, first served."""
    dynamic_batch_config: DynamicBatchConfig | None = refused(None, "limits are changed live instead")


@dataclass(slots=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    """Tokens the pool holds; rounded up to whole blocks."""
    max_attention_window: list[int] | None = refused(None, "the window is the model's own")
    sink_token_length: int | None = refused(None, "attention sinks are not offered")
    free_gpu_memory_fraction: float | None = None
    """Part of the memory that is free after loading the engine (main memory on a CPU). Default 0.9 on a GPU; on a
    CPU the pool is bounded by what `max_batch_size` sequences of `max_seq_len` tokens can use."""
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = refused(None, "only decoder-only models are offered")
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    _: KW_ONLY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = refused(False, _GPU_ONLY)
    attention_dp_events_gather_period_ms: int = refused(5, _ONE_DEVICE)
    kv_cache_dtype: str | None = None
    """`None`: as the plan computes; `"int8"`: 8 bit, quantised by token (not upstream's)."""


@dataclass(slots=True)
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass(slots=True)
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    participant_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None


@dataclass(slots=True)
class PeftCacheConfig:
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float | None = None
    host_cache_size: int | None = None
    lora_prefetch_dir: str | None = None


@dataclass(slots=True)
class DecodingConfig:
    decoding_mode: Any = None
    lookahead_decoding_config: LookaheadDecodingConfig | None = None
    medusa_choices: list[list[int]] | None = refused(None, "draft heads are not offered yet")
    eagle_config: EagleConfig | None = refused(None, "draft models are not offered yet")


@dataclass(slots=True)
class DebugConfig:
    debug_input_tensors: bool = False
    debug_output_tensors: bool = False
    debug_tensor_names: list[str] | None = None
    debug_tensors_max_iterations: int = 0


@dataclass(slots=True)
class LogitsPostProcessorConfig:
    processor_map: dict[str, LogitsPostProcessor] | None = None
    processor_batched: Callable[..., None] | None = None
    replicate: bool = True


@dataclass(slots=True)
class ExtendedRuntimePerfKnobConfig:
    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: int = 0


@dataclass(slots=True)
class SpeculativeDecodingConfig:
    fast_logits: bool = False


class GuidedDecodingBackend(IntEnum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass(slots=True)
class GuidedDecodingConfig:
    """`encoded_vocab`, `tokenizer_str` and `stop_token_ids` default to the engine directory's tokenizer."""

    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend

    backend: GuidedDecodingBackend = GuidedDecodingBackend.LLGUIDANCE
    encoded_vocab: list[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: list[int] | None = None


@dataclass(slots=True)
class CacheTransceiverConfig:
    backend: Any = None
    max_tokens_in_buffer: int | None = None


@dataclass(slots=True)
class ExecutorConfig:
    """Everything about running an engine that was not fixed when it was built.

    `max_batch_size` and `max_num_tokens` default to, and may not exceed, what the engine was built for.
    """

    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = True
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = refused(None, _ONE_DEVICE)
    peft_cache_config: PeftCacheConfig = field(default_factory=PeftCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    use_gpu_direct_storage: bool = refused(False, _GPU_ONLY)
    gpu_weights_percent: float = refused(1.0, "weights are not streamed")
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: int = refused(0, "requests are taken as they come")
    max_seq_idle_microseconds: int = refused(180_000_000, _ONE_DEVICE)
    spec_dec_config: SpeculativeDecodingConfig | None = refused(None, "draft models are not offered yet")
    guided_decoding_config: GuidedDecodingConfig | None = None
    additional_model_outputs: list[AdditionalModelOutput] | None = refused(None, "this version does not offer it")
    cache_transceiver_config: CacheTransceiverConfig | None = refused(
        None, "transfer between instances is not offered yet"
    )
    gather_generation_logits: bool = False
    mm_embedding_offloading: bool = refused(False, "only text models are offered")
    enable_trt_overlap: bool = refused(False, "scheduling does not wait for it")
    fail_fast_on_attention_window_too_large: bool = False
    _: KW_ONLY
    deterministic: bool = False
    """At least two query rows for each sequence in each step, so that logits are bit-equal whatever else is in the
    batch, however the context was chunked, reused or recomputed (not upstream's)."""
    iteration_table_max_rows: int = 0
    """Rows of the iteration table that are kept; 0 keeps none (not upstream's)."""
    max_queued_tokens: int | None = None
    """Bound on the prompt tokens that wait (not upstream's)."""
    num_threads: int | None = None
    """CPU threads of the engine; `None` takes all cores (not upstream's)."""
