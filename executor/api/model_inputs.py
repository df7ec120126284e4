"""What models can be given beside tokens: named for scripts, not offered.

Names, order and defaults follow `tensorrt_llm.bindings.executor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from executor.api.support import refused

_NO_ADAPTERS = "LoRA adapters are not offered yet"


@dataclass(slots=True)
class LoraConfig:
    task_id: int
    weights: Any = None
    config: Any = None


@dataclass(slots=True)
class PeftCacheConfig:
    num_host_module_layer: int = refused(0, _NO_ADAPTERS)
    num_device_module_layer: int = refused(0, _NO_ADAPTERS)
    optimal_adapter_size: int = refused(8, _NO_ADAPTERS)
    max_adapter_size: int = refused(64, _NO_ADAPTERS)
    num_put_workers: int = refused(1, _NO_ADAPTERS)
    num_ensure_workers: int = refused(1, _NO_ADAPTERS)
    num_copy_streams: int = refused(1, _NO_ADAPTERS)
    max_pages_per_block_host: int = refused(24, _NO_ADAPTERS)
    max_pages_per_block_device: int = refused(8, _NO_ADAPTERS)
    device_cache_percent: float | None = refused(None, _NO_ADAPTERS)
    host_cache_size: int | None = refused(None, _NO_ADAPTERS)
    lora_prefetch_dir: str | None = refused(None, _NO_ADAPTERS)


@dataclass(slots=True)
class PromptTuningConfig:
    embedding_table: Any
    input_token_extra_ids: list[int] | None = None


@dataclass(slots=True)
class MultimodalInput:
    multimodal_hashes: list[list[int]]
    multimodal_positions: list[int]
    multimodal_lengths: list[int]


@dataclass(slots=True)
class MropeConfig:
    mrope_rotary_cos_sin: Any
    mrope_position_deltas: Any
