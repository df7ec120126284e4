"""What Prometheus sees of the tiers below the pool."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from executor.api.stats import IterationStats, KvCacheStats
from executor.serving.metrics import LatestIteration


class OneIteration:
    """The part of a `StatsFeed` that gauges read."""

    def __init__(self, cache: KvCacheStats) -> None:
        self.latest = IterationStats("11-30-2026 12:00:00.000000", iter=1, kv_cache_stats=cache)


def exposition(cache: KvCacheStats) -> str:
    registry = CollectorRegistry()
    registry.register(LatestIteration(OneIteration(cache), "model", "1"))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def test_tiers_copies_and_leaks_are_exposed() -> None:
    text = exposition(
        KvCacheStats(
            max_num_blocks=8,
            host_max_blocks=40,
            host_used_blocks=12,
            disk_max_blocks=90,
            offloaded_blocks=7,
            onboarded_blocks=5,
            failed_transfers=1,
            leaked_blocks=3,
        )
    )
    for line in (
        'inflight_kv_cache_tier_blocks{kind="used",tier="host"} 12.0',
        'inflight_kv_cache_tier_blocks{kind="max",tier="disk"} 90.0',
        'inflight_kv_cache_transfers_total{outcome="offloaded"} 7.0',
        'inflight_kv_cache_transfers_total{outcome="onboarded"} 5.0',
        'inflight_kv_cache_transfers_total{outcome="failed"} 1.0',
        "inflight_kv_cache_leaked_blocks 3.0",
    ):
        assert line in text.splitlines()


def test_nothing_is_said_of_tiers_that_are_not_there() -> None:
    text = exposition(KvCacheStats(max_num_blocks=8))
    assert "tier_blocks" not in text
    assert "kv_cache_transfers" not in text
