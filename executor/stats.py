"""Statistics of iterations and requests, and the iteration table: bounded, recorded by the loop, drained by callers."""

from __future__ import annotations

import threading
from collections import deque
from datetime import UTC, datetime

from batch_manager import (
    BatchManager,
    FinishReason,
    IterationPlan,
    IterationRow,
    KvCacheManager,
    Phase,
    Progress,
    iteration_rows,
)
from executor.api.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
)


class StatsRecorder:
    """Keeps the latest iterations, as many as asked for; older ones fall out. Safe to drain from any thread."""

    def __init__(
        self,
        batch_manager: BatchManager,
        kv: KvCacheManager,
        *,
        max_iterations: int,
        max_request_iterations: int,
        max_table_rows: int,
    ) -> None:
        self._batch_manager = batch_manager
        self._kv = kv
        self._lock = threading.Lock()
        self._iterations: deque[IterationStats] = deque(maxlen=max_iterations)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=max_request_iterations)
        self._table: deque[IterationRow] = deque(maxlen=max_table_rows)

    def record(self, plan: IterationPlan, progress: list[Progress], seconds: float, engine_seconds: float) -> None:
        """Take in one finished iteration; the caller holds the BatchManager's lock."""
        with self._lock:
            if self._iterations.maxlen:
                self._iterations.append(self._iteration_stats(plan, progress, seconds, engine_seconds))
            if self._requests.maxlen:
                self._requests.append(self._request_stats(plan))

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
        self, plan: IterationPlan, progress: list[Progress], seconds: float, engine_seconds: float
    ) -> IterationStats:
        manager = self._batch_manager
        context = [item for item in plan.scheduled if item.phase is Phase.CONTEXT]
        num_generation = len(plan.scheduled) - len(context)
        num_tokens = sum(len(made.new_token_ids) for made in progress)
        num_samples = sum(item.samples for item in plan.scheduled)
        num_drafts = {item.request.request_id: item.num_draft_tokens for item in plan.scheduled}
        drafted = [made for made in progress if num_drafts[made.request.request_id]]
        stats = IterationStats(
            timestamp=datetime.now(UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
            iter=plan.iteration,
            iter_latency_ms=seconds * 1e3,
            engine_latency_ms=engine_seconds * 1e3,
            num_active_requests=manager.num_running,
            num_queued_requests=manager.num_waiting,
            num_completed_requests=sum(made.finish_reason is not FinishReason.NOT_FINISHED for made in progress),
            max_num_active_requests=manager.config.max_batch_size,
            max_batch_size_runtime=manager.config.max_batch_size,
            max_num_tokens_runtime=manager.config.max_num_tokens,
            kv_cache_stats=self._kv_cache_stats(),
            inflight_batching_stats=InflightBatchingStats(
                num_scheduled_requests=len(plan.scheduled),
                num_context_requests=len(context),
                num_gen_requests=num_generation,
                num_paused_requests=len(plan.paused),
                num_ctx_tokens=sum(item.num_scheduled_tokens for item in context),
                avg_num_decoded_tokens_per_iter=num_tokens / num_samples if num_samples else 0.0,
            ),
        )
        if drafted:
            accepted = sum(made.num_accepted_draft_tokens for made in drafted)
            stats.spec_decoding_stats = SpecDecodingStats(
                num_draft_tokens=sum(num_drafts.values()),
                num_accepted_tokens=accepted,
                num_requests_with_draft_tokens=len(drafted),
                acceptance_length=1 + accepted / len(drafted),
            )
        return stats

    def _kv_cache_stats(self) -> KvCacheStats:
        kv = self._kv
        return KvCacheStats(
            max_num_blocks=kv.num_blocks,
            free_num_blocks=kv.num_free_blocks,
            used_num_blocks=kv.num_blocks - kv.num_free_blocks,
            tokens_per_block=kv.tokens_per_block,
        )

    def _request_stats(self, plan: IterationPlan) -> RequestStatsPerIteration:
        rows = []
        for item in plan.scheduled:
            request = item.request
            if request.is_finished:
                stage = RequestStage.GENERATION_COMPLETE
            elif request.num_computed_tokens < request.num_prompt_tokens:
                stage = RequestStage.CONTEXT_IN_PROGRESS
            else:
                stage = RequestStage.GENERATION_IN_PROGRESS
            rows.append(
                RequestStats(
                    id=request.request_id,
                    stage=stage,
                    context_prefill_position=min(request.num_computed_tokens, request.num_prompt_tokens),
                    num_generated_tokens=request.num_generated_tokens,
                    scheduled=True,
                )
            )
        rows += [RequestStats(id=request.request_id, paused=True) for request in plan.paused]
        return RequestStatsPerIteration(iter=plan.iteration, request_stats=rows)
