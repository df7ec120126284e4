"""The parameters of the model `tensorrt_llm`: which there are, how they are read, and what they set.

The names are TensorRT-LLM's. A parameter that is unknown, cannot be read, or asks for what is not offered is an error
that names it, at load; nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from executor.api.config import (
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    SchedulerConfig,
)
from executor.api.decoding import DecodingConfig, DecodingMode, LookaheadDecodingConfig
from executor.api.guided import GuidedDecodingConfig
from executor.api.kv_cache_config import CacheTransceiverConfig, KvCacheConfig
from executor.api.parallel import ParallelConfig
from executor.api.role import InstanceRole
from executor.triton.backend.settings import ParameterError, parse_flag

_ONE_DEVICE = "one process drives one device"
_ENCODER = "only decoder-only models are offered"
_LORA = "LoRA adapters are not offered yet"
_DRAFT_HEADS = "draft models and draft heads are not offered yet"
_KERNELS = "it tunes kernels that this executor does not have"


class Parameter(NamedTuple):
    """One parameter."""

    read: Callable[[str, str], Any]
    """(name, text) to its value; raises `ParameterError`."""
    allowed: tuple[Any, ...] | None = None
    """The only values that are taken; `None`: all."""
    why: str = ""
    """Why only those."""


def _text(_name: str, value: str) -> str:
    return value


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ParameterError(f"parameter {name} is {value!r}; it must be a whole number") from None


def _count(name: str, value: str) -> int:
    number = _whole(name, value)
    if number < 0:
        raise ParameterError(f"parameter {name} is {value!r}; it must be 0 or more")
    return number


def _device_id(name: str, value: str) -> int:
    """Upstream's list of GPUs, of which there may be one."""
    if "," in value or ";" in value:
        raise ParameterError(f"parameter {name} is {value!r}; it must be one number: {_ONE_DEVICE}")
    return _count(name, value)


def _fraction(name: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ParameterError(f"parameter {name} is {value!r}; it must be a number in [0, 1]")
    return fraction


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        word = value.lower()
        if word not in choices:
            raise ParameterError(f"parameter {name} is {value!r}; it must be one of {', '.join(choices)}")
        return word

    return read


PARAMETERS: Mapping[str, Parameter] = {
    # what runs
    "gpt_model_path": Parameter(_text),
    "executor_worker_path": Parameter(_text),
    "tokenizer_dir": Parameter(_text),
    "gpt_model_type": Parameter(_one_of("inflight_fused_batching", "inflight_batching", "v1")),
    "encoder_model_path": Parameter(_text, (), _ENCODER),
    # scheduling
    "batch_scheduler_policy": Parameter(_one_of("max_utilization", "guaranteed_no_evict")),
    "enable_chunked_context": Parameter(parse_flag),
    "max_beam_width": Parameter(_whole, (1,), "beam search is not offered"),
    "max_num_sequences": Parameter(_count),
    "max_queue_size": Parameter(_count),
    "max_num_tokens": Parameter(_count),
    "enable_trt_overlap": Parameter(parse_flag, (False,), "an iteration is planned when the one before it has ended"),
    # the KV cache
    "max_tokens_in_paged_kv_cache": Parameter(_count),
    "kv_cache_free_gpu_mem_fraction": Parameter(_fraction),
    "kv_cache_dtype": Parameter(_one_of("int8")),
    "enable_kv_cache_reuse": Parameter(parse_flag),
    "max_attention_window_size": Parameter(_text, (), "the window is the model's own"),
    "sink_token_length": Parameter(_count, (0,), "attention sinks are not offered"),
    "cross_kv_cache_fraction": Parameter(_fraction, (), _ENCODER),
    "kv_cache_host_memory_bytes": Parameter(_count, (0,), "offloading blocks is not offered through Triton"),
    "kv_cache_onboard_blocks": Parameter(parse_flag),
    # requests
    "exclude_input_in_output": Parameter(parse_flag),
    "normalize_log_probs": Parameter(parse_flag),
    "cancellation_check_period_ms": Parameter(_count),
    "stats_check_period_ms": Parameter(_count),
    "iter_stats_max_iterations": Parameter(_count),
    "request_stats_max_iterations": Parameter(_count),
    "recv_poll_period_ms": Parameter(_count, (0,), "requests are taken as they come"),
    "decoding_mode": Parameter(_one_of("auto", "top_k", "top_p", "top_k_top_p", "lookahead")),
    "lookahead_window_size": Parameter(_count),
    "lookahead_ngram_size": Parameter(_count),
    "lookahead_verification_set_size": Parameter(_count),
    "guided_decoding_backend": Parameter(_one_of("xgrammar", "llguidance")),
    "xgrammar_tokenizer_info_path": Parameter(_text, (), "the engine directory's tokenizer says it all"),
    "medusa_choices": Parameter(_text, (), _DRAFT_HEADS),
    "eagle_choices": Parameter(_text, (), _DRAFT_HEADS),
    "speculative_decoding_fast_logits": Parameter(parse_flag, (False,), _DRAFT_HEADS),
    # devices
    "FORCE_CPU_ONLY_INPUT_TENSORS": Parameter(parse_flag),
    "gpu_device_ids": Parameter(_device_id),
    "participant_ids": Parameter(_text, ("0",), _ONE_DEVICE),
    "num_nodes": Parameter(_count, (1,), _ONE_DEVICE),
    "gpu_weights_percent": Parameter(_fraction),
    "enable_context_fmha_fp32_acc": Parameter(parse_flag, (False,), _KERNELS),
    "multi_block_mode": Parameter(parse_flag, (True,), _KERNELS),
    "cuda_graph_mode": Parameter(parse_flag),
    "cuda_graph_cache_size": Parameter(_count),
    # contexts from and to other instances, not upstream's
    "instance_role": Parameter(_one_of(*InstanceRole)),
    "transfer_listen": Parameter(_text),
    "kv_transfer_timeout_ms": Parameter(_count),
    # adapters
    "lora_cache_optimal_adapter_size": Parameter(_count, (), _LORA),
    "lora_cache_max_adapter_size": Parameter(_count, (), _LORA),
    "lora_cache_gpu_memory_fraction": Parameter(_fraction, (), _LORA),
    "lora_cache_host_memory_bytes": Parameter(_count, (), _LORA),
    "lora_prefetch_dir": Parameter(_text, (), _LORA),
    # the CPU engine's, not upstream's
    "num_threads": Parameter(_count),
    "deterministic": Parameter(parse_flag),
}


_TRANSFER_FIELDS = {
    "role": "instance_role",
    "listen": "transfer_listen",
    "kv_transfer_timeout_ms": "kv_transfer_timeout_ms",
}
"""Field of `CacheTransceiverConfig` to parameter."""


@dataclass(frozen=True)
class ModelSettings:
    """What a model of the repository runs."""

    engine_dir: Path
    executor_config: ExecutorConfig
    exclude_input_in_output: bool
    stats_period_seconds: float
    guides: bool
    """Whether grammars were asked for by `guided_decoding_backend`; otherwise they are there when they can be."""


def read_parameter(name: str, text: str) -> Any:
    """The value of a parameter.

    Raises:
        ParameterError: it is unknown, cannot be read, or asks for what is not offered.
    """
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise ParameterError(f"parameter {name} is unknown; docs/triton.md lists those that are known")
    value = parameter.read(name, text)
    if parameter.allowed is not None and value not in parameter.allowed:
        raise ParameterError(f"parameter {name} is {text!r}, which is not offered: {parameter.why}")
    return value


def model_settings(texts: Mapping[str, str]) -> ModelSettings:
    """What the parameters of a model say.

    Raises:
        ParameterError: names the first that is wrong, and what would be right.
    """
    values = {name: read_parameter(name, text) for name, text in texts.items()}
    if "gpt_model_path" not in values:
        raise ParameterError("parameter gpt_model_path is not set; it is the engine directory")
    is_static = values.get("gpt_model_type") == "v1"
    policy = "static_batch" if is_static else values.get("batch_scheduler_policy", "guaranteed_no_evict")
    config = ExecutorConfig(
        batching_type=BatchingType.STATIC if is_static else BatchingType.INFLIGHT,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy[policy.upper()]),
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=values.get("enable_kv_cache_reuse", True),
            max_tokens=values.get("max_tokens_in_paged_kv_cache"),
            free_gpu_memory_fraction=values.get("kv_cache_free_gpu_mem_fraction"),
            kv_cache_dtype=values.get("kv_cache_dtype"),
        ),
        enable_chunked_context=values.get("enable_chunked_context", True),
        iter_stats_max_iterations=values.get("iter_stats_max_iterations", 1000),
        request_stats_max_iterations=values.get("request_stats_max_iterations", 0),
        max_batch_size=values.get("max_num_sequences"),
        max_num_tokens=values.get("max_num_tokens"),
        max_queue_size=values.get("max_queue_size"),
        decoding_config=_decoding_config(values),
        # The first GPU is what a template names, on a CPU too.
        parallel_config=ParallelConfig(device_ids=[values["gpu_device_ids"]]) if values.get("gpu_device_ids") else None,
        gpu_weights_percent=values.get("gpu_weights_percent", 1.0),
        extended_runtime_perf_knob_config=ExtendedRuntimePerfKnobConfig(
            cuda_graph_mode=values.get("cuda_graph_mode"),
            cuda_graph_cache_size=values.get("cuda_graph_cache_size", 0),
        ),
        num_threads=values.get("num_threads"),
        deterministic=values.get("deterministic", False),
        cache_transceiver_config=_transceiver_config(values),
    )
    guides = "guided_decoding_backend" in values
    if guides:
        config.guided_decoding_config = GuidedDecodingConfig()
    return ModelSettings(
        Path(values["gpt_model_path"]),
        config,
        values.get("exclude_input_in_output", False),
        max(1, values.get("stats_check_period_ms", 100)) / 1000,
        guides,
    )


def _transceiver_config(values: Mapping[str, Any]) -> CacheTransceiverConfig | None:
    """Contexts are exchanged where the instance has a role."""
    fields = {name: values[key] for name, key in _TRANSFER_FIELDS.items() if key in values}
    if not fields:
        return None
    if "role" not in fields:
        raise ParameterError("parameter instance_role is not set; transfers need it: context, generation or both")
    return CacheTransceiverConfig(**{**fields, "role": InstanceRole(fields["role"])})


def _decoding_config(values: Mapping[str, Any]) -> DecodingConfig | None:
    names = [f"lookahead_{name}" for name in ("window_size", "ngram_size", "verification_set_size")]
    sizes = [values[name] for name in names if name in values]
    if sizes:
        if len(sizes) < len(names):
            raise ParameterError(
                "parameters lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size go "
                "together; set all of them or none"
            )
        return DecodingConfig(lookahead_decoding_config=LookaheadDecodingConfig(*sizes))
    modes = {
        "auto": DecodingMode.Auto,
        "top_k": DecodingMode.TopK,
        "top_p": DecodingMode.TopP,
        "top_k_top_p": DecodingMode.TopKTopP,
        "lookahead": DecodingMode.Lookahead,
    }
    mode = values.get("decoding_mode")
    return None if mode is None else DecodingConfig(decoding_mode=modes[mode]())
