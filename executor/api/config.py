"""How an Executor runs. Names, order and defaults follow `tensorrt_llm.bindings.executor`, except where a docstring
says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from pathlib import Path

from executor.api.decoding import DecodingConfig, SpeculativeDecodingConfig
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingConfig
from executor.api.kv_cache_config import CacheTransceiverConfig, KvCacheConfig
from executor.api.model_inputs import PeftCacheConfig
from executor.api.parallel import ONE_DEVICE, ParallelConfig
from executor.api.request import AdditionalModelOutput, LogitsPostProcessor
from executor.api.support import accepted, addition, check_supported, refused, refused_members, supported

__all__ = [
    "BatchingType",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "DebugConfig",
    "DynamicBatchConfig",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "KvCacheConfig",
    "LogitsPostProcessorConfig",
    "ModelType",
    "SchedulerConfig",
]

_NO_KERNELS = "it tunes kernels that this executor does not have"
_DECODER_ONLY = "only decoder-only models are offered"


@refused_members(ENCODER_ONLY=_DECODER_ONLY, ENCODER_DECODER=_DECODER_ONLY)
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
class DebugConfig:
    """Which tensors of each step are kept, by `executor.debug_tensors.TENSOR_NAMES`."""

    debug_input_tensors: bool = False
    """Keep everything that the engine is given."""
    debug_output_tensors: bool = False
    """Keep the logits."""
    debug_tensor_names: list[str] | None = None
    """Keep these, too."""
    debug_tensors_max_iterations: int = 0
    """Iterations kept for `get_latest_debug_tensors`; 0: each iteration is written to files instead."""
    _: KW_ONLY
    dump_dir: str = addition("/tmp/tllm_debug")
    """Files are `<dump_dir>/PP_1/TP_1/iteration_<n>/<name>.npy`, as upstream's were."""


@dataclass(slots=True)
class LogitsPostProcessorConfig:
    processor_map: dict[str, LogitsPostProcessor] | None = None
    processor_batched: Callable[..., None] | None = None
    replicate: bool = accepted(True, ONE_DEVICE)


@dataclass(slots=True)
class ExtendedRuntimePerfKnobConfig:
    multi_block_mode: bool = refused(True, _NO_KERNELS)
    enable_context_fmha_fp32_acc: bool = refused(False, _NO_KERNELS)
    cuda_graph_mode: bool | None = None
    """Whether generation steps are recorded in CUDA graphs; `None`: with target `tensorrt`; `reference` on a GPU can,
    too. Upstream's default was off."""
    cuda_graph_cache_size: int = 0
    """Batch sizes that are recorded, evenly spread; 0: all that steps are padded to."""

    def validate(self) -> None:
        """Raise an `InvalidRequestError` naming the first field that is wrong whatever the engine is."""
        name = "extended_runtime_perf_knob_config.cuda_graph_cache_size"
        _check_not_negative(name, self.cuda_graph_cache_size)
        if self.cuda_graph_cache_size and not self.cuda_graph_mode:
            raise InvalidRequestError(
                f"{name} is {self.cuda_graph_cache_size}; it goes with cuda_graph_mode, which is "
                f"{self.cuda_graph_mode}",
                field=name,
            )


@dataclass(slots=True)
class ExecutorConfig:
    """Everything about running an engine that was not fixed when it was built.

    `max_batch_size` and `max_num_tokens` default to, and may not exceed, what the engine was built for.
    """

    max_beam_width: int = supported(1, "1 only: beam search is not offered")
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = True
    """On by default, as in upstream's C++; upstream's Python bindings left it off."""
    normalize_log_probs: bool = accepted(True, "it concerns beam search, which is not offered")
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    """Its `device_ids` name the GPU; the first one by default."""
    peft_cache_config: PeftCacheConfig = field(default_factory=PeftCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    use_gpu_direct_storage: bool = refused(False, "plans are read through main memory")
    gpu_weights_percent: float = 1.0
    """Part of the weights that stay in the GPU's memory, in (0, 1]; the others are read from main memory in each step.
    Below 1 for engines built with `--weight_streaming` only."""
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: int = refused(0, "requests are taken as they come")
    max_seq_idle_microseconds: int = refused(180_000_000, ONE_DEVICE)
    spec_dec_config: SpeculativeDecodingConfig | None = refused(None, "draft models are not offered yet")
    guided_decoding_config: GuidedDecodingConfig | None = None
    """Needed by requests with `guided_decoding_params`."""
    additional_model_outputs: list[AdditionalModelOutput] | None = refused(None, "plans have no output but logits")
    cache_transceiver_config: CacheTransceiverConfig | None = None
    """Needed by context-only and generation-only requests."""
    gather_generation_logits: bool = accepted(False, "requests may ask for their logits anyway")
    mm_embedding_offloading: bool = refused(False, "only text models are offered")
    enable_trt_overlap: bool = refused(False, "an iteration is planned when the one before it has ended")
    fail_fast_on_attention_window_too_large: bool = accepted(False, "the window is the model's own")
    _: KW_ONLY
    deterministic: bool = addition(False)
    """At least two query rows for each sequence in each step, so that logits are bit-equal whatever else is in the
    batch, however the context was chunked, reused or recomputed."""
    iteration_table_max_rows: int = addition(0)
    """Rows of the iteration table that are kept; 0 keeps none."""
    max_queued_tokens: int | None = addition(None)
    """Bound on the prompt tokens that wait."""
    num_threads: int | None = addition(None)
    """CPU threads of the engine; `None` takes all cores."""
    receipts_max_requests: int = addition(1000)
    """Receipts kept for `Executor.get_receipt`, those of the requests that ended last."""
    trace_path: str | Path | None = addition(None)
    """Record what the BatchManager and the KV cache are asked and decide into this file, for
    `batch_manager.trace.replay`."""
    trace_redact: bool = addition(False)
    """Keep token ids, cache salts and image digests out of the trace: what is left can be replayed, and not read."""

    def validate(self) -> None:
        """Raise a `RequestError` naming the first field that is wrong whatever the engine is."""
        check_supported(self, "executor_config")
        if self.max_beam_width != 1:
            raise InvalidRequestError(
                f"max_beam_width is {self.max_beam_width}; beam search is not offered, it must be 1",
                field="max_beam_width",
            )
        if not 0 < self.gpu_weights_percent <= 1:
            raise InvalidRequestError(
                f"gpu_weights_percent is {self.gpu_weights_percent}; it must be in (0, 1]", field="gpu_weights_percent"
            )
        if self.parallel_config is not None:
            self.parallel_config.validate()
        self.extended_runtime_perf_knob_config.validate()
        if self.decoding_config is not None:
            self.decoding_config.validate()
        if self.cache_transceiver_config is not None:
            self.cache_transceiver_config.validate()
            if self.trace_path is not None:
                raise UnsupportedFeatureError(
                    "trace_path is not supported with cache_transceiver_config: a trace does not hold what other "
                    "instances send",
                    field="trace_path",
                )
        for name in (
            "iter_stats_max_iterations",
            "request_stats_max_iterations",
            "iteration_table_max_rows",
            "receipts_max_requests",
        ):
            _check_not_negative(name, getattr(self, name))
        self.kv_cache_config.validate()
        if self.trace_redact and self.trace_path is None:
            raise InvalidRequestError(
                "trace_redact is set without a trace_path: nothing is recorded", field="trace_redact"
            )
        if self.debug_config is not None:
            _check_not_negative(
                "debug_config.debug_tensors_max_iterations", self.debug_config.debug_tensors_max_iterations
            )

    @property
    def logits_post_processor_map(self) -> dict[str, LogitsPostProcessor] | None:
        """Upstream's older spelling of `logits_post_processor_config.processor_map`."""
        given = self.logits_post_processor_config
        return None if given is None else given.processor_map

    @logits_post_processor_map.setter
    def logits_post_processor_map(self, processors: dict[str, LogitsPostProcessor] | None) -> None:
        self._post_processors().processor_map = processors

    @property
    def logits_post_processor_batched(self) -> Callable[..., None] | None:
        """Upstream's older spelling of `logits_post_processor_config.processor_batched`."""
        given = self.logits_post_processor_config
        return None if given is None else given.processor_batched

    @logits_post_processor_batched.setter
    def logits_post_processor_batched(self, processor: Callable[..., None] | None) -> None:
        self._post_processors().processor_batched = processor

    def _post_processors(self) -> LogitsPostProcessorConfig:
        if self.logits_post_processor_config is None:
            self.logits_post_processor_config = LogitsPostProcessorConfig()
        return self.logits_post_processor_config


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise InvalidRequestError(f"{name} is {value}; it must be 0 or more", field=name)
