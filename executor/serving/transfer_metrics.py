"""Prometheus metrics of contexts that are exchanged with other instances, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.transfer.stats import TransferStats


class TransferCollector(Collector):
    """`inflight_context_*`, and what TensorRT-LLM's Triton backend says of disaggregated serving; nothing where no
    contexts are exchanged."""

    def __init__(self, stats: Callable[[], TransferStats | None], model_name: str, version: str) -> None:
        self._stats = stats
        self._labels = [model_name, version]

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: what there is is known when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        offered = {"offered": stats.num_offered, "sent": stats.num_sent, "expired": stats.num_expired}
        yield _counter("inflight_contexts_offered", "Contexts for others, by what became of them.", offered)
        received = {f"recomputed: {kind}": count for kind, count in sorted(stats.recomputed.items())}
        received["received"] = stats.num_received
        yield _counter("inflight_contexts_wanted", "Contexts of others, by whether they came.", received)
        yield _total("inflight_contexts_found", "Of these, prefixes that a peer had cached.", stats.num_found)
        yield _total("inflight_context_tokens_received", "Tokens of contexts that came.", stats.num_received_tokens)
        yield _total("inflight_context_bytes_received", "Bytes of contexts that came.", stats.num_received_bytes)
        yield _total(
            "inflight_context_transfer_seconds",
            "Time that contexts took to come.",
            stats.transfer_seconds,
        )
        yield _total("inflight_context_late_messages", "About contexts that had ended.", stats.num_late_messages)
        yield GaugeMetricFamily(
            "inflight_context_quarantined_blocks",
            "Blocks of failed transfers that may still be written to.",
            stats.num_quarantined_blocks,
        )
        # A gauge, as all of that backend's names here: a counter's would end in _total.
        triton = GaugeMetricFamily(
            "nv_trt_llm_disaggregated_serving_metrics",
            "Contexts that came, and the time they took.",
            labels=["model", "version", "disaggregated_serving_type"],
        )
        triton.add_metric([*self._labels, "kv_cache_transfer_ms"], stats.transfer_seconds * 1000)
        triton.add_metric([*self._labels, "request_count"], stats.num_received)
        yield triton


def _counter(name: str, documentation: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=["outcome"])
    for value_name, value in values.items():
        family.add_metric([value_name], value)
    return family


def _total(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value=value)
