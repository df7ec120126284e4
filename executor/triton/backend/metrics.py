"""TensorRT-LLM's metric families on Triton's metrics endpoint, names and labels as they were there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

_GAUGES: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "request": (
        "nv_trt_llm_request_metrics",
        "request_type",
        ("active", "max", "scheduled", "context", "waiting"),
    ),
    "memory": ("nv_trt_llm_runtime_memory_metrics", "memory_type", ("cpu", "gpu", "pinned")),
    "kv_cache": (
        "nv_trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        ("max", "free", "used", "tokens_per", "reused", "fraction"),
    ),
    "inflight": (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
    ),
    "v1": (
        "nv_trt_llm_v1_metrics",
        "v1_specific_metric",
        ("total_context_tokens", "total_generation_tokens", "empty_generation_slots"),
    ),
    "general": ("nv_trt_llm_general_metrics", "general_type", ("timestamp", "iteration_counter")),
}
"""By the Executor's name of the group: family, label that tells its members apart, members."""

_HELP: Mapping[str, str] = {
    "request": "TRT LLM request metrics",
    "memory": "TRT LLM runtime memory metrics",
    "kv_cache": "TRT LLM KV cache block metrics",
    "inflight": "TRT LLM inflight_batcher-specific metrics",
    "v1": "TRT LLM v1-specific metrics",
    "general": "General TRT LLM metrics",
}
_LENGTH_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]


class Metrics:
    """What one model shows. Its instances share the numbers: Triton gives equal labels one value.

    A group of gauges appears with its first values, so that an engine batched in flight shows no `v1` metrics.
    """

    def __init__(self, model_name: str, model_version: str) -> None:
        self._labels = {"model": model_name, "version": model_version}
        self._gauges: dict[str, dict[str, Any]] = {}
        self._families: list[Any] = []
        self._output_tokens = self._histogram("nv_llm_output_token_len", "total_output_tokens")
        self._input_tokens = self._histogram("nv_llm_input_token_len", "total_input_tokens")
        self._transfers = self._counters()

    def update(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        """Set gauges: values by group and member."""
        for group, values in stats.items():
            if group not in self._gauges:
                self._gauges[group] = self._group(group)
            gauges = self._gauges[group]
            for member, value in values.items():
                gauges[member].set(value)

    def count_transfers(self, counts: Mapping[str, float]) -> None:
        """Add to what KV cache transfers between instances have taken."""
        for member, value in counts.items():
            self._transfers[member].increment(value)

    def observe_lengths(self, lengths: Sequence[Sequence[int]]) -> None:
        """Count ended requests: prompt and output tokens of each."""
        for prompt_tokens, output_tokens in lengths:
            self._input_tokens.observe(prompt_tokens)
            self._output_tokens.observe(output_tokens)

    def _group(self, group: str) -> dict[str, Any]:
        name, label, members = _GAUGES[group]
        family = pb_utils.MetricFamily(name=name, description=_HELP[group], kind=pb_utils.MetricFamily.GAUGE)
        self._families.append(family)
        return {member: family.Metric(labels={**self._labels, label: member}) for member in members}

    def _counters(self) -> dict[str, Any]:
        family = pb_utils.MetricFamily(
            name="nv_trt_llm_disaggregated_serving_metrics",
            description="TRT LLM disaggregated serving metrics",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._families.append(family)
        members = ("kv_cache_transfer_ms", "request_count")
        return {
            member: family.Metric(labels={**self._labels, "disaggregated_serving_type": member}) for member in members
        }

    def _histogram(self, name: str, member: str) -> Any:
        family = pb_utils.MetricFamily(
            name=name, description="TRT LLM response metrics", kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self._families.append(family)
        return family.Metric(labels={**self._labels, "response_metric_type": member}, buckets=_LENGTH_BUCKETS)
