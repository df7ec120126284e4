"""From the Executor's responses to events for Triton: what is always there, and what a request asked for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from executor.api.response import RequestPerfMetrics, Result
from executor.api.stats import InflightBatchingStats, IterationStats, StaticBatchingStats
from executor.transfer.stats import TransferStats
from executor.triton.backend.wire import FrameWriter
from executor.triton.context_phase import to_tensor
from executor.triton.requests import RowRequest


def event(key: int, row: RowRequest, result: Result, writer: FrameWriter) -> list[Any]:
    """`[key, sequence, token ids, finish reason, is final, extras]`; arrays go into the writer."""
    return [
        key,
        result.sequence_index,
        result.output_token_ids[0],
        int(result.finish_reasons[0]),
        result.is_final,
        _extras(row, result, writer),
    ]


def _extras(row: RowRequest, result: Result, writer: FrameWriter) -> dict[str, Any] | None:
    """Outputs beside tokens, by their Triton names, without the batch dimension."""
    extras: dict[str, Any] = {}
    if result.cum_log_probs is not None and result.log_probs is not None:
        extras["cum_log_probs"] = result.cum_log_probs
        extras["output_log_probs"] = result.log_probs
    if result.context_logits is not None:
        # [tokens, vocab] once, and [0, vocab] before: clients look for it in each response of a stream
        is_whole = result.is_sequence_final or not row.request.streaming
        extras["context_logits"] = {"array": writer.put(result.context_logits[: None if is_whole else 0])}
    if result.generation_logits is not None:
        logits = result.generation_logits  # [1, tokens, vocab], or [tokens, 1, vocab] when streaming
        by_beam = logits.swapaxes(0, 1) if row.request.streaming else logits
        extras["generation_logits"] = {"array": writer.put(by_beam)}
    if result.request_perf_metrics is not None:
        extras.update(_perf_metrics(result.request_perf_metrics))
    if result.context_phase_params is not None:
        extras["context_phase_params"] = {"array": writer.put(to_tensor(result.context_phase_params))}
    if row.return_num_input_tokens:
        extras["num_input_tokens"] = [result.usage.prompt_tokens]
    if row.return_num_output_tokens:
        extras["num_output_tokens"] = [result.usage.completion_tokens]
    return extras or None


def _perf_metrics(metrics: RequestPerfMetrics) -> dict[str, list[float]]:
    """Times are nanoseconds of the monotonic clock, 0 where there is none yet."""
    timing, cache, drafts = metrics.timing_metrics, metrics.kv_cache_metrics, metrics.speculative_decoding
    return {
        "kv_cache_alloc_new_blocks": [cache.num_new_allocated_blocks],
        "kv_cache_reused_blocks": [cache.num_reused_blocks],
        "kv_cache_alloc_total_blocks": [cache.num_total_allocated_blocks],
        "arrival_time_ns": [_nanoseconds(timing.arrival_time)],
        "first_scheduled_time_ns": [_nanoseconds(timing.first_scheduled_time)],
        "first_token_time_ns": [_nanoseconds(timing.first_token_time)],
        "last_token_time_ns": [_nanoseconds(timing.last_token_time)],
        "acceptance_rate": [drafts.acceptance_rate],
        "total_accepted_draft_tokens": [drafts.total_accepted_draft_tokens],
        "total_draft_tokens": [drafts.total_draft_tokens],
    }


def _nanoseconds(duration: timedelta) -> int:
    return duration // timedelta(microseconds=1) * 1000


def idle(stats: IterationStats) -> IterationStats:
    """The statistics of an iteration as they are once nothing runs any more."""
    return replace(
        stats,
        num_active_requests=0,
        num_queued_requests=0,
        inflight_batching_stats=None if stats.inflight_batching_stats is None else InflightBatchingStats(),
        static_batching_stats=None if stats.static_batching_stats is None else StaticBatchingStats(),
    )


def transfer_counts(stats: TransferStats) -> dict[str, float]:
    """Contexts that have gone whole from one instance to another so far, and the time it took the receiving one."""
    return {
        "kv_cache_transfer_ms": stats.transfer_seconds * 1000,
        "request_count": stats.num_sent + stats.num_received,
    }


def metric_values(stats: IterationStats, now: float) -> dict[str, dict[str, float]]:
    """What the gauges show after an iteration: values by group and member, as `backend.metrics` names them.

    As upstream's, `active` are all requests the loop knows, and `waiting` those of them that the iteration left out.

    Args:
        stats: of the iteration.
        now: seconds since the epoch.
    """
    active = stats.num_active_requests + stats.num_queued_requests
    inflight, static = stats.inflight_batching_stats, stats.static_batching_stats
    ran = inflight or static
    scheduled = 0 if ran is None else ran.num_scheduled_requests
    values: dict[str, dict[str, float]] = {
        "request": {
            "active": active,
            "max": stats.max_num_active_requests,
            "scheduled": scheduled,
            "context": 0 if ran is None else ran.num_context_requests,
            "waiting": max(0, active - scheduled),
        },
        "memory": {"cpu": stats.cpu_mem_usage, "gpu": stats.gpu_mem_usage, "pinned": stats.pinned_mem_usage},
        "general": {"timestamp": int(now * 1e6), "iteration_counter": stats.iter},
    }
    cache = stats.kv_cache_stats
    if cache is not None:
        values["kv_cache"] = {
            "max": cache.max_num_blocks,
            "free": cache.free_num_blocks,
            "used": cache.used_num_blocks,
            "tokens_per": cache.tokens_per_block,
            "reused": cache.reused_blocks,
            "fraction": cache.used_num_blocks / cache.max_num_blocks if cache.max_num_blocks else 0.0,
        }
    if inflight is not None:
        values["inflight"] = {
            "total_context_tokens": inflight.num_ctx_tokens,
            "generation_requests": inflight.num_gen_requests,
            "micro_batch_id": inflight.micro_batch_id,
            "paused_requests": inflight.num_paused_requests,
        }
    if static is not None:
        values["v1"] = {
            "total_context_tokens": static.num_ctx_tokens,
            "total_generation_tokens": static.num_gen_tokens,
            "empty_generation_slots": static.empty_gen_slots,
        }
    return values
