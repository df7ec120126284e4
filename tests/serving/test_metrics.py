"""Metrics of iterations that lack sections."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from executor.api.stats import IterationStats
from executor.serving.metrics import Metrics
from executor.serving.stats_feed import StatsFeed
from executor.transfer.stats import TransferStats
from tests.serving.fake_executor import FakeExecutor


class WithoutSections(FakeExecutor):
    """Tells of iterations without a batch, a KV cache or speculation."""

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return [IterationStats(timestamp="11-30-2026 12:00:00.250000", iter=7)]


async def exposition(executor: FakeExecutor) -> str:
    """What is scraped of an executor, which is shut down."""
    feed = StatsFeed(executor)
    try:
        return Metrics(feed, executor.get_transfer_stats, model_name="m").exposition().decode()
    finally:
        feed.close()
        await asyncio.to_thread(executor.shutdown)


async def test_statistics_without_a_kv_cache_are_exposed_all_the_same() -> None:
    """Statistics failed where there was no KV cache manager."""
    executor = WithoutSections()
    text = await exposition(executor)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {sample.labels["general_type"]: sample.value for sample in families["nv_trt_llm_general_metrics"].samples}
    assert samples["iteration_counter"] == 7
    assert "nv_trt_llm_kv_cache_block_metrics" not in families
    assert "nv_trt_llm_inflight_batcher_metrics" not in families


async def test_contexts_that_were_exchanged_are_exposed() -> None:
    executor = FakeExecutor()
    executor.transfer_stats = TransferStats(
        num_offered=5, num_sent=3, num_expired=1, num_received=4, num_received_bytes=900, transfer_seconds=0.25
    )
    executor.transfer_stats.recomputed["lease ended"] = 2
    text = await exposition(executor)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert values["inflight_contexts_offered_total", "sent"] == 3
    assert values["inflight_contexts_offered_total", "expired"] == 1
    assert values["inflight_contexts_wanted_total", "received"] == 4
    assert values["inflight_contexts_wanted_total", "recomputed: lease ended"] == 2
    assert values["inflight_context_bytes_received_total",] == 900
    assert values["nv_trt_llm_disaggregated_serving_metrics", "kv_cache_transfer_ms", "m", "1"] == 250


async def test_nothing_is_said_of_contexts_where_none_are_exchanged() -> None:
    executor = FakeExecutor()
    text = await exposition(executor)
    assert "inflight_contexts" not in text
    assert "disaggregated" not in text
