"""What the Executor tells of its iterations and requests. Names follow `tensorrt_llm.bindings.executor`, and the keys
of `to_json_str` those of upstream's JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from numpy.typing import NDArray

from executor.api.support import addition, never_set

TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S.%f"
"""Of `IterationStats.timestamp`, which is in UTC."""


class _ToJson:
    __slots__ = ()

    _JSON_KEYS: ClassVar[dict[str, str]] = {}
    """Keys that are not the field's name in camel case."""

    def to_json_str(self) -> str:
        """All fields as JSON."""
        return json.dumps(self, default=_json_value)


def _json_value(value: Any) -> dict[str, Any]:
    """Called by json for what it does not know: these dataclasses."""
    return {
        value._JSON_KEYS.get(each.name, _camel_case(each.name)): getattr(value, each.name) for each in fields(value)
    }


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join("MS" if word == "ms" else word.capitalize() for word in rest)


@dataclass(slots=True)
class KvCacheStats(_ToJson):
    """The block pool now; counts of blocks allocated, reused and missed are since the start."""

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    """Allocatable: free, or cached and held by nobody."""
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    """Entries of block tables that were filled: with new blocks, or with cached ones."""
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    """Full blocks of prompts that were not cached."""
    cache_hit_rate: float = 0.0
    host_max_blocks: int = addition(0)
    """Blocks that fit into `host_cache_size`."""
    host_used_blocks: int = addition(0)
    disk_max_blocks: int = addition(0)
    """Blocks that fit into `disk_cache_size`."""
    disk_used_blocks: int = addition(0)
    offloaded_blocks: int = addition(0)
    """Copied out of the pool, or from main memory to disk."""
    onboarded_blocks: int = addition(0)
    """Brought back into the pool."""
    failed_transfers: int = addition(0)
    """Copies that failed; each failed load is a miss."""
    failures_by_kind: dict[str, int] = addition(default_factory=dict)
    """Those, by what happened: `damaged`, `short file`, `ENOSPC`, ..."""
    pinned_blocks: int = addition(0)
    leaked_blocks: int = addition(0)
    """Found in nobody's use when idle, and not used again."""


@dataclass(slots=True)
class StaticBatchingStats(_ToJson):
    """What an iteration ran, where `batching_type` is `STATIC`."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0
    """Sequences that the iteration had room for, but did not run."""


@dataclass(slots=True)
class InflightBatchingStats(_ToJson):
    """What an iteration ran, where `batching_type` is `INFLIGHT`."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = never_set(0, "there is one micro batch")
    avg_num_decoded_tokens_per_iter: float = 0.0
    """Tokens that each sequence which got any got."""


@dataclass(slots=True)
class SpecDecodingStats(_ToJson):
    """The drafts that an iteration verified."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    """Tokens that a request with drafts got, on average."""
    iter_latency_ms: float = 0.0
    """Time spent proposing drafts."""
    draft_overhead: float = 0.0
    """That time as a part of the iteration's."""


@dataclass(slots=True)
class IterationStats(_ToJson):
    """One iteration. Times are milliseconds, sizes bytes. A sequence of `num_return_sequences` is a request here."""

    _JSON_KEYS: ClassVar[dict[str, str]] = {"specdec_stats": "specDecodingStats"}

    timestamp: str = ""
    """When it ended; see `TIMESTAMP_FORMAT`."""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    """Time that the new active requests have waited, in all."""
    num_new_active_requests: int = 0
    """Requests that ran for the first time."""
    num_active_requests: int = 0
    """Requests that hold KV blocks, after the iteration."""
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    """Requests that ended since the iteration before: finished, cancelled, timed out, failed."""
    max_num_active_requests: int = 0
    max_batch_size_static: int = 0
    max_batch_size_tuner_recommended: int = 0
    max_batch_size_runtime: int = 0
    max_num_tokens_static: int = 0
    max_num_tokens_tuner_recommended: int = 0
    max_num_tokens_runtime: int = 0
    gpu_mem_usage: int = never_set(0, "engines run in main memory")
    cpu_mem_usage: int = 0
    """Main memory of the process."""
    pinned_mem_usage: int = never_set(0, "engines run in main memory")
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = never_set(None, "only decoder-only models are offered")
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: SpecDecodingStats | None = None
    engine_latency_ms: float = addition(0.0)
    """Of `iter_latency_ms`, the forward pass."""

    @property
    def spec_decoding_stats(self) -> SpecDecodingStats | None:
        """`specdec_stats`, by the name of its type and of its JSON key."""
        return self.specdec_stats


class RequestStage(StrEnum):
    QUEUED = "QUEUED"
    ENCODER_IN_PROGRESS = "ENCODER_IN_PROGRESS"
    CONTEXT_IN_PROGRESS = "CONTEXT_IN_PROGRESS"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    GENERATION_COMPLETE = "GENERATION_COMPLETE"


@dataclass(slots=True)
class DisServingRequestStats(_ToJson):
    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass(slots=True)
class RequestStats(_ToJson):
    """One sequence in one iteration."""

    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False
    """Lost its blocks, and waits to get some again."""
    dis_serving_stats: DisServingRequestStats | None = never_set(None, "transfer between instances is not offered yet")
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0
    sequence_index: int = addition(0)
    """Which of the request's `num_return_sequences` it is."""


@dataclass(slots=True)
class RequestStatsPerIteration(_ToJson):
    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)


@dataclass(slots=True)
class DebugTensorsPerIteration:
    iter: int = 0
    debug_tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
