"""Statistics of iterations and requests, and the iteration table: bounded, recorded by the loop, drained by callers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from batch_manager import (
    BatchManager,
    IterationPlan,
    IterationRow,
    KvCacheManager,
    Phase,
    Progress,
    RequestState,
    iteration_rows,
)
from executor.api.config import BatchingType
from executor.api.stats import (
    TIMESTAMP_FORMAT,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)
from executor.engines.interface import EngineSpec
from executor.kv_upkeep import KvUpkeep
from executor.live_request import LiveSequence


class StatsLimits(NamedTuple):
    """How much is kept; 0 of anything costs nothing."""

    max_iterations: int
    max_request_iterations: int
    max_table_rows: int


class IterationTimes(NamedTuple):
    """What an iteration took, in seconds."""

    whole: float
    engine: float
    drafts: float
    """Proposing drafts for the next one."""


class StatsRecorder:
    """Keeps the latest iterations, as many as asked for; older ones fall out. Safe to drain from any thread.

    The loop calls `record...` under the BatchManager's lock.
    """

    def __init__(
        self,
        batch_manager: BatchManager,
        kv: KvCacheManager,
        kv_upkeep: KvUpkeep,
        spec: EngineSpec,
        batching_type: BatchingType,
        limits: StatsLimits,
    ) -> None:
        self._batch_manager = batch_manager
        self._kv = kv
        self._kv_upkeep = kv_upkeep
        self._spec = spec
        self._is_static = batching_type is BatchingType.STATIC
        self._lock = threading.Lock()
        self._iterations: deque[IterationStats] = deque(maxlen=limits.max_iterations)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=limits.max_request_iterations)
        self._table: deque[IterationRow] = deque(maxlen=limits.max_table_rows)
        self._num_ended_before = 0

    def record(
        self,
        plan: IterationPlan,
        progress: Sequence[Progress],
        times: IterationTimes,
        new: Sequence[LiveSequence],
        num_ended: int,
    ) -> None:
        """Take in one finished iteration.

        Args:
            plan: what was run.
            progress: what came of it.
            times: how long it took.
            new: sequences that ran for the first time.
            num_ended: sequences that have ended since the start.
        """
        if not self._iterations.maxlen:
            return
        stats = self._iteration_stats(plan, times, new)
        stats.num_completed_requests = num_ended - self._num_ended_before
        self._num_ended_before = num_ended
        num_tokens = sum(len(made.new_token_ids) for made in progress)
        if self._is_static:
            stats.static_batching_stats = self._static_stats(plan, num_tokens)
        else:
            stats.inflight_batching_stats = _inflight_stats(plan, num_tokens)
        stats.specdec_stats = _spec_decoding_stats(plan, progress, times)
        with self._lock:
            self._iterations.append(stats)

    def record_requests(self, plan: IterationPlan, sequences: Iterable[LiveSequence]) -> None:
        """Take in where each live sequence is, those that end in this iteration included."""
        if not self._requests.maxlen:
            return
        scheduled = {item.request.request_id for item in plan.scheduled}
        rows = [_request_stats(sequence, sequence.scheduled.request_id in scheduled) for sequence in sequences]
        with self._lock:
            self._requests.append(RequestStatsPerIteration(plan.iteration, rows))

    def record_rows(self, plan: IterationPlan) -> None:
        """Add an iteration to the table; before `BatchManager.update`, which takes blocks back."""
        if self._table.maxlen:
            with self._lock:
                self._table.extend(iteration_rows(plan))

    def take_iterations(self) -> list[IterationStats]:
        """Iterations since the last call."""
        with self._lock:
            taken = list(self._iterations)
            self._iterations.clear()
            return taken

    def take_request_stats(self) -> list[RequestStatsPerIteration]:
        """Request statistics since the last call."""
        with self._lock:
            taken = list(self._requests)
            self._requests.clear()
            return taken

    def table(self) -> list[IterationRow]:
        """The iteration table so far; reading does not clear it."""
        with self._lock:
            return list(self._table)

    def _iteration_stats(
        self, plan: IterationPlan, times: IterationTimes, new: Sequence[LiveSequence]
    ) -> IterationStats:
        manager, spec = self._batch_manager, self._spec
        waited = sum(sequence.scheduled.receipt.queue_seconds for sequence in new)
        return IterationStats(
            timestamp=datetime.now(UTC).strftime(TIMESTAMP_FORMAT),
            iter=plan.iteration,
            iter_latency_ms=times.whole * 1e3,
            engine_latency_ms=times.engine * 1e3,
            new_active_requests_queue_latency_ms=waited * 1e3,
            num_new_active_requests=len(new),
            num_active_requests=manager.num_running,
            num_queued_requests=manager.num_waiting,
            max_num_active_requests=manager.config.num_active_limit,
            max_batch_size_static=spec.max_batch_size,
            max_batch_size_tuner_recommended=manager.config.max_batch_size,
            max_batch_size_runtime=manager.config.max_batch_size,
            max_num_tokens_static=spec.max_num_tokens,
            max_num_tokens_tuner_recommended=manager.config.max_num_tokens,
            max_num_tokens_runtime=manager.config.max_num_tokens,
            cpu_mem_usage=resident_bytes(),
            kv_cache_stats=self._kv_cache_stats(),
        )

    def _kv_cache_stats(self) -> KvCacheStats:
        stats = self._kv.stats()
        return KvCacheStats(
            max_num_blocks=stats.max_num_blocks,
            free_num_blocks=stats.free_num_blocks,
            used_num_blocks=stats.used_num_blocks,
            tokens_per_block=stats.tokens_per_block,
            alloc_total_blocks=stats.alloc_total_blocks,
            alloc_new_blocks=stats.alloc_new_blocks,
            reused_blocks=stats.reused_blocks,
            missed_blocks=stats.missed_blocks,
            cache_hit_rate=stats.cache_hit_rate,
            host_max_blocks=stats.host.num_blocks,
            host_used_blocks=stats.host.used_blocks,
            disk_max_blocks=stats.disk.num_blocks,
            disk_used_blocks=stats.disk.used_blocks,
            offloaded_blocks=stats.offloaded_blocks,
            onboarded_blocks=stats.onboarded_blocks,
            failed_transfers=stats.failed_transfers,
            failures_by_kind=self._kv_upkeep.failures(),
            pinned_blocks=stats.pinned_blocks,
            leaked_blocks=stats.quarantined_blocks,
        )

    def _static_stats(self, plan: IterationPlan, num_tokens: int) -> StaticBatchingStats:
        context = [item for item in plan.scheduled if item.phase is Phase.CONTEXT]
        return StaticBatchingStats(
            num_scheduled_requests=len(plan.scheduled),
            num_context_requests=len(context),
            num_ctx_tokens=sum(item.num_scheduled_tokens for item in context),
            num_gen_tokens=num_tokens,
            empty_gen_slots=self._batch_manager.config.max_batch_size - len(plan.scheduled),
        )


def _inflight_stats(plan: IterationPlan, num_tokens: int) -> InflightBatchingStats:
    context = [item for item in plan.scheduled if item.phase is Phase.CONTEXT]
    num_samples = sum(item.samples for item in plan.scheduled)
    return InflightBatchingStats(
        num_scheduled_requests=len(plan.scheduled),
        num_context_requests=len(context),
        num_gen_requests=len(plan.scheduled) - len(context),
        num_paused_requests=len(plan.paused),
        num_ctx_tokens=sum(item.num_scheduled_tokens for item in context),
        avg_num_decoded_tokens_per_iter=num_tokens / num_samples if num_samples else 0.0,
    )


def _spec_decoding_stats(
    plan: IterationPlan, progress: Sequence[Progress], times: IterationTimes
) -> SpecDecodingStats | None:
    num_drafts = {item.request.request_id: item.num_draft_tokens for item in plan.scheduled if item.num_draft_tokens}
    verified = [made for made in progress if made.request.request_id in num_drafts]
    if not verified:
        return None
    num_accepted = sum(made.num_accepted_draft_tokens for made in verified)
    return SpecDecodingStats(
        num_draft_tokens=sum(num_drafts[made.request.request_id] for made in verified),
        num_accepted_tokens=num_accepted,
        num_requests_with_draft_tokens=len(verified),
        acceptance_length=1 + num_accepted / len(verified),
        iter_latency_ms=times.drafts * 1e3,
        draft_overhead=times.drafts / times.whole,
    )


def _request_stats(sequence: LiveSequence, is_scheduled: bool) -> RequestStats:
    request = sequence.scheduled
    if request.is_finished:
        stage = RequestStage.GENERATION_COMPLETE
    elif sequence.first_scheduled_time is None:
        stage = RequestStage.QUEUED
    elif request.num_generated_tokens:
        stage = RequestStage.GENERATION_IN_PROGRESS
    else:
        stage = RequestStage.CONTEXT_IN_PROGRESS
    kv = sequence.kv_cache_metrics()
    return RequestStats(
        id=sequence.request.request_id,
        sequence_index=sequence.index,
        stage=stage,
        context_prefill_position=min(request.num_computed_tokens, request.num_prompt_tokens),
        num_generated_tokens=request.num_generated_tokens,
        avg_num_decoded_tokens_per_iter=sequence.tokens_per_iteration,
        scheduled=is_scheduled,
        paused=request.state is RequestState.PAUSED,
        alloc_total_blocks_per_request=kv.num_total_allocated_blocks,
        alloc_new_blocks_per_request=kv.num_new_allocated_blocks,
        reused_blocks_per_request=kv.num_reused_blocks,
        missed_blocks_per_request=kv.num_missed_blocks,
        kv_cache_hit_rate_per_request=kv.kv_cache_hit_rate,
    )


def resident_bytes() -> int:
    """Main memory that the process takes now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
