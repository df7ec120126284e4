"""Counts for people and dashboards."""

from __future__ import annotations

from typing import NamedTuple


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

    @property
    def cache_hit_rate(self) -> float:
        asked = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / asked if asked else 0.0
