"""What the KV block manager is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from batch_manager.kv.errors import InvalidKvCacheConfigError
from batch_manager.kv.eviction import EvictionStrategy
from batch_manager.kv.retention import MAX_PRIORITY, MIN_PRIORITY

DEFAULT_OFFLOAD_MIN_PRIORITY = 30
"""TensorRT-LLM's."""


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """The block pool and what is done with it.

    Args:
        num_blocks: device blocks, ids `0 .. num_blocks - 1`.
        tokens_per_block: positions a block holds; a power of two in engines, any positive number here.
        enable_block_reuse: whether full blocks are found again by later requests.
        enable_partial_reuse: whether the leading tokens of a block that differs further on are reused too.
        copy_on_partial_reuse: whether such a block may be in use by others; it is copied then. When off, only a block
            that nobody holds and nothing follows is taken, in place.
        attention_window: positions a token attends to, itself included, when that holds for every layer; blocks that
            fall out of it are given back while the request runs. `None`: all positions.
        eviction_strategy: order of eviction within a priority.
        host_blocks: slots of the host tier, 0 for none.
        disk_blocks: slots of the disk tier, 0 for none. Lower tiers need full attention: no `attention_window`.
        secondary_offload_min_priority: cached blocks below it are dropped, not kept in a lower tier.
        offload_free_fraction: a tier is backed up below while less than this fraction of its blocks is free.
        max_offloads_per_step: copies to lower tiers ordered at a time.
        max_pinned_fraction: of the device blocks, how many may be pinned.
        event_buffer_max_size: events kept until somebody takes them; 0: no events.

    Raises:
        InvalidKvCacheConfigError: a field is out of range.
    """

    num_blocks: int
    tokens_per_block: int
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    attention_window: int | None = None
    eviction_strategy: EvictionStrategy = EvictionStrategy.LRU
    host_blocks: int = 0
    disk_blocks: int = 0
    secondary_offload_min_priority: int = DEFAULT_OFFLOAD_MIN_PRIORITY
    offload_free_fraction: float = 0.5
    max_offloads_per_step: int = 64
    max_pinned_fraction: float = 0.25
    event_buffer_max_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "tokens_per_block", "max_offloads_per_step"):
            self._check(name, 1)
        for name in ("host_blocks", "disk_blocks", "event_buffer_max_size"):
            self._check(name, 0)
        for name in ("offload_free_fraction", "max_pinned_fraction"):
            self._check(name, 0.0, 1.0)
        self._check("secondary_offload_min_priority", MIN_PRIORITY, MAX_PRIORITY)
        if self.attention_window is not None:
            self._check("attention_window", 1)
            if self.host_blocks or self.disk_blocks:
                raise InvalidKvCacheConfigError(
                    f"attention_window ({self.attention_window}) and lower tiers (host_blocks {self.host_blocks}, "
                    f"disk_blocks {self.disk_blocks}) cannot be combined; set one of them only"
                )

    def _check(self, name: str, low: float, high: float | None = None) -> None:
        value = getattr(self, name)
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"within {low} and {high}"
            raise InvalidKvCacheConfigError(f"{name} is {value}; it must be {allowed}")
