"""What happens to the KV cache, event by event: the names of `tensorrt_llm.bindings.executor.kv_cache`.

An event's `data` is one of `KVCacheCreatedData`, `KVCacheStoredData`, `KVCacheRemovedData`, `KVCacheUpdatedData`, or
`KVCacheOverflowData`, which upstream did not have: there events that did not fit the buffer were lost silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class KVCacheCreatedData:
    """The cache begins."""

    num_blocks_per_cache_level: list[int]


@dataclass(frozen=True, slots=True)
class UniqueToken:
    token_id: int
    token_extra_id: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheStoredBlockData:
    block_hash: int
    """64 bits: the first of the block's 256-bit digest, which covers all tokens before it, adapter and salt."""
    tokens: list[UniqueToken]
    lora_id: int | None
    cache_level: int
    """0: the pool that the engine reads."""
    priority: int
    mm_keys: list[tuple[bytes, int]]
    """For each multimodal item that reaches into the block: its hash, and where it starts relative to the block."""


@dataclass(frozen=True, slots=True)
class KVCacheStoredData:
    """Blocks can be found from now on; each is the parent of the next."""

    parent_hash: int | None
    """Of the block before the first one; `None`: the first one begins a prompt."""
    blocks: list[KVCacheStoredBlockData]


@dataclass(frozen=True, slots=True)
class KVCacheRemovedData:
    """Blocks can be found no more."""

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class KVCacheEventDiffInt:
    old_value: int
    new_value: int


@dataclass(frozen=True, slots=True)
class KVCacheUpdatedData:
    """A block moved, or is worth more or less; what did not change is `None`."""

    block_hash: int
    cache_level: KVCacheEventDiffInt | None = None
    priority: KVCacheEventDiffInt | None = None


@dataclass(frozen=True, slots=True)
class KVCacheOverflowData:
    """The buffer was full: so many events are missing here."""

    num_lost_events: int


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    event_id: int
    """Consecutive; an overflow has the id of the last event lost."""
    data: KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData | KVCacheOverflowData
    window_size: int
    """Tokens that attention reaches back."""
    attention_dp_rank: int | None = None


class KVCacheEventManager:
    """Hands out events, each once. Made by `Executor.get_kv_cache_event_manager`; safe to use from any thread."""

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[float | None], list[KVCacheEvent]]) -> None:
        """`take` waits so many seconds (`None`: as long as it takes) for events, and takes those there are."""
        self._take = take

    def get_latest_events(self, timeout: timedelta | float | None = None) -> list[KVCacheEvent]:
        """Events since the last call, oldest first.

        Args:
            timeout: how long to wait for the first one, as a `timedelta` or in milliseconds. `None` waits until there
                is one, or the executor is shut down.
        """
        if isinstance(timeout, timedelta):
            return self._take(timeout.total_seconds())
        return self._take(None if timeout is None else timeout / 1e3)
