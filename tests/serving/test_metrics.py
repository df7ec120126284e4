"""Metrics of iterations that lack sections."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from executor.api.stats import IterationStats
from executor.serving.metrics import Metrics
from executor.serving.stats_feed import StatsFeed
from tests.serving.fake_executor import FakeExecutor


class WithoutSections(FakeExecutor):
    """Tells of iterations without a batch, a KV cache or speculation."""

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return [IterationStats(timestamp="11-30-2026 12:00:00.250000", iter=7)]


async def test_statistics_without_a_kv_cache_are_exposed_all_the_same() -> None:
    """Statistics failed where there was no KV cache manager."""
    executor = WithoutSections()
    feed = StatsFeed(executor)
    try:
        families = {
            family.name: family
            for family in text_string_to_metric_families(Metrics(feed, model_name="m").exposition().decode())
        }
    finally:
        feed.close()
        await asyncio.to_thread(executor.shutdown)
    samples = {sample.labels["general_type"]: sample.value for sample in families["nv_trt_llm_general_metrics"].samples}
    assert samples["iteration_counter"] == 7
    assert "nv_trt_llm_kv_cache_block_metrics" not in families
    assert "nv_trt_llm_inflight_batcher_metrics" not in families
