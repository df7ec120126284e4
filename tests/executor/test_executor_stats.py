"""Iteration and request statistics: every number is what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from executor import (
    BatchingType,
    CapacitySchedulerPolicy,
    Executor,
    IterationStats,
    KvCacheConfig,
    RequestStage,
    SamplingConfig,
    SchedulerConfig,
)
from executor.stats import resident_bytes
from tests.executor.driving import OpenExecutor, finish, request, run, run_one, wait_until


def iterations(executor: Executor) -> list[IterationStats]:
    """All iterations so far, once the last one is recorded."""
    wait_until(lambda: executor.num_unfinished_requests == 0)
    collected: list[IterationStats] = []

    def quiet() -> bool:
        new = executor.get_latest_iteration_stats()
        collected.extend(new)
        return not new

    time.sleep(0.05)
    wait_until(quiet)
    return collected


def test_requests_are_counted_when_they_become_active_wait_and_end(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=2)
    with executor._loop.batch_manager_lock:
        ids = executor.enqueue_requests([request([3 + index], 3 + index) for index in range(5)])
        time.sleep(0.02)
    for each in ids:
        finish(executor, each)
    stats = iterations(executor)
    assert [each.iter for each in stats] == list(range(len(stats)))
    assert sum(each.num_new_active_requests for each in stats) == 5
    assert sum(each.num_completed_requests for each in stats) == 5
    assert stats[0].num_new_active_requests == 2
    assert stats[0].num_active_requests == 2
    assert stats[0].num_queued_requests == 3
    assert stats[0].new_active_requests_queue_latency_ms >= 2 * 20
    assert stats[-1].num_active_requests == stats[-1].num_queued_requests == 0
    for each in stats:
        assert (each.new_active_requests_queue_latency_ms > 0) == (each.num_new_active_requests > 0)
        assert each.max_num_active_requests == each.max_batch_size_runtime == 2
        assert (each.max_batch_size_static, each.max_num_tokens_static) == (16, 64)
        assert each.max_num_tokens_runtime == 64
        assert 0 < each.engine_latency_ms <= each.iter_latency_ms
        assert each.cpu_mem_usage > 10 << 20
        batch = each.inflight_batching_stats
        assert batch is not None
        assert each.static_batching_stats is None
        assert batch.num_scheduled_requests == batch.num_context_requests + batch.num_gen_requests
        assert batch.avg_num_decoded_tokens_per_iter == 1.0


def test_cancelled_timed_out_and_failed_requests_count_as_completed(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    with executor._loop.batch_manager_lock:
        blocker = executor.enqueue_request(request([3] * 20, 200, streaming=True))
        late = executor.enqueue_request(request([4], allotted_time_ms=1))
        several = executor.enqueue_request(request([5], sampling_config=SamplingConfig(num_return_sequences=2)))
    finish(executor, late)
    executor.cancel_request(several)
    finish(executor, several)
    executor.cancel_request(blocker)
    finish(executor, blocker)
    run_one(executor, request([6]))
    stats = iterations(executor)
    assert sum(each.num_completed_requests for each in stats) == 1 + 2 + 1 + 1
    assert sum(each.num_new_active_requests for each in stats) == 2


def test_kv_counts_are_those_of_the_cache(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(max_tokens=200))
    prompt = list(range(10, 31))
    run(executor, request(prompt, 4))
    before = iterations(executor)[-1].kv_cache_stats
    run(executor, request(prompt, 4))
    after = iterations(executor)[-1].kv_cache_stats
    assert before is not None
    assert after is not None
    assert (before.max_num_blocks, before.tokens_per_block) == (50, 4)
    assert (before.reused_blocks, before.cache_hit_rate) == (0, 0.0)
    assert before.missed_blocks == 5
    assert before.alloc_new_blocks == before.alloc_total_blocks == 6
    assert after.reused_blocks == 5
    assert after.missed_blocks == 5
    assert after.cache_hit_rate == 0.5
    assert after.alloc_new_blocks == 7
    assert after.alloc_total_blocks == 12
    assert after.used_num_blocks == 0


def test_static_batching_has_its_own_numbers(open_executor: OpenExecutor) -> None:
    executor = open_executor(batching_type=BatchingType.STATIC, max_batch_size=4)
    run(executor, request([3, 4], 2), request([5], 4))
    stats = [each.static_batching_stats for each in iterations(executor)]
    assert all(each is not None for each in stats)
    assert sum(each.num_gen_tokens for each in stats if each) == 6
    assert sum(each.num_ctx_tokens for each in stats if each) == 3
    assert all(each.empty_gen_slots == 4 - each.num_scheduled_requests for each in stats if each)


def test_the_json_has_upstreams_keys(open_executor: OpenExecutor) -> None:
    executor = open_executor(request_stats_max_iterations=10)
    run_one(executor, request([3, 4], 2))
    data = json.loads(executor.get_latest_iteration_stats()[0].to_json_str())
    assert set(data) >= {
        *("timestamp", "iter", "iterLatencyMS", "newActiveRequestsQueueLatencyMS", "numNewActiveRequests"),
        *("numActiveRequests", "numQueuedRequests", "numCompletedRequests", "maxNumActiveRequests"),
        *("maxBatchSizeStatic", "maxBatchSizeTunerRecommended", "maxBatchSizeRuntime"),
        *("maxNumTokensStatic", "maxNumTokensTunerRecommended", "maxNumTokensRuntime"),
        *("gpuMemUsage", "cpuMemUsage", "pinnedMemUsage", "kvCacheStats", "staticBatchingStats"),
        *("inflightBatchingStats", "specDecodingStats"),
    }
    assert data["staticBatchingStats"] is data["specDecodingStats"] is None
    assert set(data["kvCacheStats"]) >= {
        *("maxNumBlocks", "freeNumBlocks", "usedNumBlocks", "tokensPerBlock", "allocTotalBlocks", "allocNewBlocks"),
        *("reusedBlocks", "missedBlocks", "cacheHitRate"),
    }
    assert data["inflightBatchingStats"]["numCtxTokens"] == 2
    assert data["inflightBatchingStats"]["avgNumDecodedTokensPerIter"] == 1.0
    per_iteration = json.loads(executor.get_latest_request_stats()[0].to_json_str())
    (row,) = per_iteration["requestStats"]
    assert row["stage"] == "GENERATION_IN_PROGRESS"
    assert row["disServingStats"] is None
    assert set(row) >= {
        *("id", "contextPrefillPosition", "numGeneratedTokens", "avgNumDecodedTokensPerIter", "scheduled", "paused"),
        *("allocTotalBlocksPerRequest", "allocNewBlocksPerRequest", "reusedBlocksPerRequest"),
        *("missedBlocksPerRequest", "kvCacheHitRatePerRequest"),
    }


def test_request_stats_follow_each_request_from_the_queue_to_its_end(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1, max_num_tokens=8, request_stats_max_iterations=1000)
    with executor._loop.batch_manager_lock:
        first, second = executor.enqueue_requests([request([3] * 20, 3), request([5], 2)])
    for each in (first, second):
        finish(executor, each)
    wait_until(lambda: len(executor._stats._requests) == 7)
    by_request: dict[int, list[Any]] = {first: [], second: []}
    for iteration in executor.get_latest_request_stats():
        for row in iteration.request_stats:
            by_request[row.id].append(row)
    assert executor.get_latest_request_stats() == []
    stages = [row.stage for row in by_request[first]]
    assert stages == [
        *[RequestStage.CONTEXT_IN_PROGRESS] * 2,
        *[RequestStage.GENERATION_IN_PROGRESS] * 2,
        RequestStage.GENERATION_COMPLETE,
    ]
    assert [row.context_prefill_position for row in by_request[first]] == [8, 16, 20, 20, 20]
    assert [row.num_generated_tokens for row in by_request[first]] == [0, 0, 1, 2, 3]
    assert all(row.scheduled for row in by_request[first])
    assert [row.stage for row in by_request[second]] == [
        *[RequestStage.QUEUED] * 5,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_COMPLETE,
    ]
    assert [row.scheduled for row in by_request[second]] == [False] * 5 + [True] * 2
    assert by_request[first][0].missed_blocks_per_request == 5


def test_paused_requests_are_told(open_executor: OpenExecutor) -> None:
    executor = open_executor(
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=80, enable_block_reuse=False),
        request_stats_max_iterations=1000,
    )
    run(executor, *(request([3 + index] * 12, 40) for index in range(4)))
    rows = [row for iteration in executor.get_latest_request_stats() for row in iteration.request_stats]
    paused = [row for row in rows if row.paused]
    assert paused
    assert all(not row.scheduled and row.stage is not RequestStage.QUEUED for row in paused)


@pytest.mark.parametrize("count", [0, 3])
def test_no_more_is_kept_than_asked_for(open_executor: OpenExecutor, count: int) -> None:
    executor = open_executor(iter_stats_max_iterations=count, request_stats_max_iterations=count)
    run_one(executor, request([3], 10))
    wait_until(lambda: executor.num_unfinished_requests == 0)
    time.sleep(0.05)
    assert len(executor.get_latest_iteration_stats()) == count
    assert len(executor.get_latest_request_stats()) == count


def test_statistics_that_are_off_are_not_even_computed(
    open_executor: OpenExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(iter_stats_max_iterations=0)

    def unwanted(*_: object) -> None:
        raise AssertionError("computed though nobody wants it")

    for name in ("_iteration_stats", "_kv_cache_stats"):
        monkeypatch.setattr(executor._stats, name, unwanted)
    monkeypatch.setattr("executor.stats._request_stats", unwanted)
    assert len(run_one(executor, request([3])).output_token_ids[0]) == 12


def test_the_memory_of_the_process_is_that_of_the_kernel() -> None:
    status = Path("/proc/self/status").read_text()
    kilobytes = int(status.split("VmRSS:")[1].split()[0])
    assert resident_bytes() == pytest.approx(kilobytes * 1024, rel=0.05)
