"""From the Executor's public configuration to the BatchManager and its KV block manager."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from batch_manager import BatchManager, BatchManagerConfig, KvCacheManager
from batch_manager import CapacitySchedulerPolicy as CapacityPolicy
from batch_manager import ContextChunkingPolicy as ChunkingPolicy
from batch_manager.kv import KvCacheConfig
from batch_manager.kv.config import DEFAULT_OFFLOAD_MIN_PRIORITY
from batch_manager.trace import InstantClock, ObservedKvCacheManager, TraceRecorder
from executor.api import config as api
from executor.api.errors import InvalidRequestError
from executor.engines.interface import EngineSpec
from executor.pool_size import PoolSize

_logger = logging.getLogger(__name__)


def batch_manager_config(config: api.ExecutorConfig, spec: EngineSpec) -> BatchManagerConfig:
    """The scheduler's limits and policies.

    Raises:
        InvalidRequestError: a limit is beyond what the engine was built for, or cannot work.
    """
    policy = CapacityPolicy(config.scheduler_config.capacity_scheduler_policy)
    if config.batching_type is api.BatchingType.STATIC:
        policy = CapacityPolicy.STATIC_BATCH
    chunking = config.scheduler_config.context_chunking_policy
    return BatchManagerConfig(
        max_batch_size=_limit("max_batch_size", config.max_batch_size, spec.max_batch_size),
        max_num_tokens=_limit("max_num_tokens", config.max_num_tokens, spec.max_num_tokens),
        capacity_scheduler_policy=policy,
        enable_chunked_context=config.enable_chunked_context,
        context_chunking_policy=ChunkingPolicy(chunking or api.ContextChunkingPolicy.FIRST_COME_FIRST_SERVED),
        max_queued_requests=config.max_queue_size,
        max_queued_tokens=config.max_queued_tokens,
        min_rows_per_sequence=2 if config.deterministic else 1,
    )


def kv_cache_manager_config(config: api.ExecutorConfig, size: PoolSize, spec: EngineSpec) -> KvCacheConfig:
    """How blocks are kept.

    Those that fall out of a sliding window are given back, unless blocks go to lower tiers or to other instances: these
    take sequences whole.
    """
    kv = config.kv_cache_config
    min_priority = kv.secondary_offload_min_priority
    window = spec.sliding_window
    if window is not None:
        if window >= spec.max_seq_len:
            window = None
        elif size.host_blocks or size.disk_blocks or config.cache_transceiver_config is not None:
            _logger.info(
                "blocks outside the sliding window of %d tokens are kept: lower tiers and transfers need them", window
            )
            window = None
    return KvCacheConfig(
        num_blocks=size.num_blocks,
        tokens_per_block=spec.tokens_per_block,
        enable_block_reuse=kv.enable_block_reuse,
        enable_partial_reuse=kv.enable_partial_reuse,
        copy_on_partial_reuse=kv.copy_on_partial_reuse,
        attention_window=window,
        event_buffer_max_size=kv.event_buffer_max_size,
        host_blocks=size.host_blocks,
        disk_blocks=size.disk_blocks,
        secondary_offload_min_priority=DEFAULT_OFFLOAD_MIN_PRIORITY if min_priority is None else min_priority,
        max_pinned_fraction=kv.max_pinned_fraction,
    )


class Scheduler(NamedTuple):
    """The BatchManager and what belongs to it."""

    batch_manager: BatchManager
    kv: KvCacheManager
    trace: TraceRecorder | None
    """The BatchManager itself, where it records; to be closed."""


def open_scheduler(
    config: BatchManagerConfig, kv_config: KvCacheConfig, trace_path: str | Path | None, *, redact: bool = False
) -> Scheduler:
    """A BatchManager, recording into `trace_path` if that is given, without prompts and answers where `redact`.

    Raises:
        OSError: the trace cannot be written there.
    """
    if trace_path is None:
        kv = KvCacheManager(kv_config)
        return Scheduler(BatchManager(config, kv), kv, None)
    clock = InstantClock()
    kv = ObservedKvCacheManager(kv_config, clock)
    recorder = TraceRecorder(config, kv, clock, trace_path, redact=redact)
    return Scheduler(recorder, kv, recorder)


def _limit(name: str, wanted: int | None, built_for: int) -> int:
    if wanted is None:
        return built_for
    if not 1 <= wanted <= built_for:
        raise InvalidRequestError(
            f"{name} is {wanted}; the engine was built for {built_for}, so it must be in [1, {built_for}]", field=name
        )
    return wanted
