"""Prometheus metrics: of requests, of iterations, and under the names of TensorRT-LLM's Triton backend.

| source | metrics |
|---|---|
| requests, as they end | `inflight_request*`, `inflight_*_tokens_total`, `nv_llm_*_token_len` |
| iterations, each one | `inflight_iteration*`, `inflight_scheduled_requests`, `inflight_draft_tokens_total`, ... |
| the latest iteration, when scraped | `inflight_live_requests`, `inflight_kv_cache_blocks`, `nv_trt_llm_*` |
| transfers, when scraped | `inflight_context*`: see `transfer_metrics.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.api.errors import RequestError
from executor.api.stats import TIMESTAMP_FORMAT, IterationStats
from executor.serving.request_record import RequestRecord
from executor.serving.stats_feed import StatsFeed
from executor.serving.transfer_metrics import TransferCollector
from executor.transfer.stats import TransferStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (10, 50, 100, 500, 1000)
"""Those of the Triton backend."""
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """A registry of its own, fed by requests (as their observer) and iterations (as a listener of the feed)."""

    def __init__(
        self,
        feed: StatsFeed,
        transfers: Callable[[], TransferStats | None],
        *,
        model_name: str,
        version: str = "1",
    ) -> None:
        self.registry = CollectorRegistry()
        self._feed = feed
        self._requests = Counter(
            "inflight_requests",
            "Requests that ended, by outcome: a finish reason, ABANDONED, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "inflight_request_refusals",
            "Requests that were refused before they were queued, by error code.",
            ["code"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("inflight_prompt_tokens", "Prompt tokens of requests that ended.")
        self._reused_tokens = self._counter("inflight_reused_tokens", "Of these, tokens found in the KV cache.")
        self._generated_tokens = self._counter("inflight_generation_tokens", "Tokens generated.")
        self._latency = self._histogram("inflight_request_latency_seconds", "From queued to ended.", _LATENCY_BUCKETS)
        self._first_token = self._histogram(
            "inflight_time_to_first_token_seconds", "From queued to the first token.", _LATENCY_BUCKETS
        )
        self._per_token = self._histogram(
            "inflight_time_per_output_token_seconds", "Mean time between a request's tokens.", _LATENCY_BUCKETS
        )
        self._input_length = self._histogram("nv_llm_input_token_len", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self._output_length = self._histogram("nv_llm_output_token_len", "Tokens generated.", _TOKEN_BUCKETS)
        self._iterations = self._counter("inflight_iterations", "Iterations of the executor.")
        self._iteration_latency = self._histogram(
            "inflight_iteration_latency_seconds", "Whole iterations.", _LATENCY_BUCKETS
        )
        self._engine_latency = self._histogram("inflight_engine_latency_seconds", "Forward passes.", _LATENCY_BUCKETS)
        self._batch_size = self._histogram("inflight_scheduled_requests", "Requests in an iteration.", _BATCH_BUCKETS)
        self._context_tokens = self._counter("inflight_context_tokens", "Prompt tokens computed in iterations.")
        self._draft_tokens = self._counter("inflight_draft_tokens", "Tokens proposed by speculation.")
        self._accepted_draft_tokens = self._counter("inflight_accepted_draft_tokens", "Of these, tokens accepted.")
        self.registry.register(LatestIteration(feed, model_name, version))
        self.registry.register(TransferCollector(transfers, model_name, version))
        feed.add_listener(self.on_iterations)

    def exposition(self) -> bytes:
        """Everything up to now, in Prometheus' text format (`CONTENT_TYPE`)."""
        self._feed.refresh()
        return generate_latest(self.registry)

    def on_refused(self, _request_id: str | None, error: RequestError) -> None:
        self._refusals.labels(str(error.code)).inc()

    def on_ended(self, record: RequestRecord) -> None:
        self._requests.labels(record.outcome).inc()
        self._prompt_tokens.inc(record.prompt_tokens)
        self._reused_tokens.inc(record.reused_tokens)
        self._generated_tokens.inc(record.completion_tokens)
        self._latency.observe(record.ended_at - record.accepted_at)
        self._input_length.observe(record.prompt_tokens)
        self._output_length.observe(record.completion_tokens)
        if record.seconds_to_first_token is not None:
            self._first_token.observe(record.seconds_to_first_token)
        if record.seconds_per_output_token is not None:
            self._per_token.observe(record.seconds_per_output_token)

    def on_iterations(self, iterations: Sequence[IterationStats]) -> None:
        self._iterations.inc(len(iterations))
        for stats in iterations:
            self._iteration_latency.observe(stats.iter_latency_ms / 1000)
            self._engine_latency.observe(stats.engine_latency_ms / 1000)
            if stats.inflight_batching_stats is not None:
                self._batch_size.observe(stats.inflight_batching_stats.num_scheduled_requests)
                self._context_tokens.inc(stats.inflight_batching_stats.num_ctx_tokens)
            if stats.spec_decoding_stats is not None:
                self._draft_tokens.inc(stats.spec_decoding_stats.num_draft_tokens)
                self._accepted_draft_tokens.inc(stats.spec_decoding_stats.num_accepted_tokens)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)


class LatestIteration(Collector):
    """Gauges of the latest iteration, read when they are scraped: nothing before the first."""

    def __init__(self, feed: StatsFeed, model_name: str, version: str) -> None:
        self._feed = feed
        self._labels = [model_name, version]

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: which gauges there are is known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._feed.latest
        if stats is None:
            return
        requests = _request_gauges(stats)
        blocks = _block_gauges(stats)
        batch = stats.inflight_batching_stats
        yield _gauge("inflight_live_requests", "Requests by state.", "state", requests)
        yield _gauge("inflight_kv_cache_blocks", "KV cache blocks.", "kind", blocks)
        yield from _tier_families(stats)
        yield self._triton("nv_trt_llm_request_metrics", "Requests.", "request_type", requests)
        yield self._triton(
            "nv_trt_llm_runtime_memory_metrics",
            "Memory in bytes.",
            "memory_type",
            {"cpu": stats.cpu_mem_usage, "gpu": stats.gpu_mem_usage, "pinned": stats.pinned_mem_usage},
        )
        if blocks:
            yield self._triton("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks.", "kv_cache_block_type", blocks)
        if batch is not None:
            yield self._triton(
                "nv_trt_llm_inflight_batcher_metrics",
                "The batch.",
                "inflight_batcher_specific_metric",
                {
                    "total_context_tokens": batch.num_ctx_tokens,
                    "generation_requests": batch.num_gen_requests,
                    "micro_batch_id": batch.micro_batch_id,
                    "paused_requests": batch.num_paused_requests,
                },
            )
        yield self._triton(
            "nv_trt_llm_general_metrics",
            "The iteration, and when it ended in microseconds since 1970.",
            "general_type",
            {"timestamp": _microseconds(stats.timestamp), "iteration_counter": stats.iter},
        )

    def _triton(self, name: str, documentation: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
        """A gauge with the labels that the Triton backend gives it."""
        family = GaugeMetricFamily(name, documentation, labels=["model", "version", label])
        for value_name, value in values.items():
            family.add_metric([*self._labels, value_name], value)
        return family


def _microseconds(timestamp: str) -> float:
    """Since 1970, of a time as `IterationStats` spells it."""
    return datetime.strptime(timestamp, TIMESTAMP_FORMAT).replace(tzinfo=UTC).timestamp() * 1e6


def _request_gauges(stats: IterationStats) -> dict[str, float]:
    batch = stats.inflight_batching_stats
    return {
        "active": stats.num_active_requests,
        "max": stats.max_num_active_requests,
        "scheduled": 0 if batch is None else batch.num_scheduled_requests,
        "context": 0 if batch is None else batch.num_context_requests,
        "waiting": stats.num_queued_requests,
    }


def _block_gauges(stats: IterationStats) -> dict[str, float]:
    cache = stats.kv_cache_stats
    if cache is None:
        return {}
    return {
        "max": cache.max_num_blocks,
        "free": cache.free_num_blocks,
        "used": cache.used_num_blocks,
        "tokens_per": cache.tokens_per_block,
        "reused": cache.reused_blocks,
        "fraction": cache.used_num_blocks / cache.max_num_blocks if cache.max_num_blocks else 0.0,
    }


def _tier_families(stats: IterationStats) -> Iterator[Metric]:
    """The tiers below the pool; nothing where there are none."""
    cache = stats.kv_cache_stats
    if cache is None:
        return
    yield GaugeMetricFamily(
        "inflight_kv_cache_leaked_blocks", "Blocks found leaked when idle, and quarantined.", cache.leaked_blocks
    )
    if not (cache.host_max_blocks or cache.disk_max_blocks):
        return
    tiers = GaugeMetricFamily(
        "inflight_kv_cache_tier_blocks", "KV cache blocks below the pool.", labels=["tier", "kind"]
    )
    for tier, num_blocks, num_used in (
        ("host", cache.host_max_blocks, cache.host_used_blocks),
        ("disk", cache.disk_max_blocks, cache.disk_used_blocks),
    ):
        tiers.add_metric([tier, "max"], num_blocks)
        tiers.add_metric([tier, "used"], num_used)
    yield tiers
    transfers = CounterMetricFamily(
        "inflight_kv_cache_transfers", "Blocks copied between tiers, by outcome.", labels=["outcome"]
    )
    transfers.add_metric(["offloaded"], cache.offloaded_blocks)
    transfers.add_metric(["onboarded"], cache.onboarded_blocks)
    transfers.add_metric(["failed"], cache.failed_transfers)
    yield transfers


def _gauge(name: str, documentation: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value_name, value in values.items():
        family.add_metric([value_name], value)
    return family
