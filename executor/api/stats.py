"""What the Executor tells of its iterations and requests. Names follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray


class _ToJson:
    __slots__ = ()

    def to_json_str(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]


@dataclass(slots=True)
class KvCacheStats(_ToJson):
    max_num_blocks: int = 0
    free_num_blocks: int = 0
    """Allocatable: free, or cached and held by nobody."""
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass(slots=True)
class InflightBatchingStats(_ToJson):
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass(slots=True)
class SpecDecodingStats(_ToJson):
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0


@dataclass(slots=True)
class IterationStats(_ToJson):
    """One iteration. Times are milliseconds."""

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    engine_latency_ms: float = 0.0
    """Of which the forward pass (not upstream's)."""
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    max_batch_size_runtime: int = 0
    max_num_tokens_runtime: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    spec_decoding_stats: SpecDecodingStats | None = None


class RequestStage(StrEnum):
    QUEUED = "QUEUED"
    ENCODER_IN_PROGRESS = "ENCODER_IN_PROGRESS"
    CONTEXT_IN_PROGRESS = "CONTEXT_IN_PROGRESS"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    GENERATION_COMPLETE = "GENERATION_COMPLETE"


@dataclass(slots=True)
class RequestStats(_ToJson):
    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False


@dataclass(slots=True)
class RequestStatsPerIteration(_ToJson):
    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)


@dataclass(slots=True)
class DebugTensorsPerIteration:
    iter: int = 0
    debug_tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
