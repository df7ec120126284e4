"""Who holds which KV block, and which prefixes are pinned. Not in TensorRT-LLM's bindings."""

from __future__ import annotations

from dataclasses import dataclass

from batch_manager.kv import BlockCounts, LedgerEntry, TierStats


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix whose blocks stay in the pool."""

    pin_id: int
    num_tokens: int
    """Tokens that are pinned: whole blocks."""
    block_ids: tuple[int, ...]
    seconds_left: float | None
    """Until it is unpinned by itself; `None`: it stays until `unpin_prefix`."""


@dataclass(frozen=True, slots=True)
class KvLedger:
    """An account of every KV block at one moment."""

    counts: BlockCounts
    """Every block of the pool is exactly one of free, used, cached and leased."""
    entries: tuple[LedgerEntry, ...]
    """Who holds what, by block id; a block that is shared has several, one that is free has none."""
    lost_blocks: tuple[int, ...]
    """Neither free nor held by anybody; quarantined."""
    host: TierStats
    disk: TierStats
    offloaded_blocks: int
    """Copied to lower tiers since the start."""
    onboarded_blocks: int
    failed_transfers: int
    failures_by_kind: dict[str, int]
    quarantined_blocks: int
    pins: tuple[PinnedPrefix, ...]
    max_pinned_blocks: int
