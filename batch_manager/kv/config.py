"""What the KV block manager is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from batch_manager.kv.errors import InvalidKvCacheConfigError
from batch_manager.kv.eviction import EvictionStrategy


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

    def __post_init__(self) -> None:
        for name in ("num_blocks", "tokens_per_block"):
            if getattr(self, name) < 1:
                raise InvalidKvCacheConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.attention_window is not None and self.attention_window < 1:
            raise InvalidKvCacheConfigError(
                f"attention_window is {self.attention_window}; it must be at least 1, or None for full attention"
            )
