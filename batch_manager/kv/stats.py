"""Counts for people and dashboards."""

from __future__ import annotations

from typing import NamedTuple


class TierStats(NamedTuple):
    """A tier below the device."""

    num_blocks: int
    used_blocks: int
    """Blocks that have a copy there, or are being copied there."""


NO_TIER = TierStats(0, 0)


class KvCacheStats(NamedTuple):
    """Names follow TensorRT-LLM's `KvCacheStats`. Counts are in blocks, since the manager was made."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    """Table entries filled: new blocks and blocks found."""
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    """Full blocks that a first allocation asked for and that were not cached."""
    num_evictions: int
    host: TierStats
    disk: TierStats
    offloaded_blocks: int
    """Copied to a lower tier."""
    onboarded_blocks: int
    """Brought back to the device."""
    failed_transfers: int
    """Copies that failed: of loads, each is a miss."""
    pinned_blocks: int
    quarantined_blocks: int
    """Leaked, and never handed out until `free_quarantined`."""

    @property
    def cache_hit_rate(self) -> float:
        asked = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / asked if asked else 0.0
