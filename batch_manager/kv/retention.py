"""How long a request's blocks are worth keeping: priorities per token range, with durations.

Names and semantics follow TensorRT-LLM's `KvCacheRetentionConfig`: priorities 0 (evicted first) to 100 (evicted last),
35 when nothing is said; a block belongs to the first listed range that touches any of its tokens; a priority with a
duration falls back to 35 when the block has been reusable (held by nobody) for so long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

from batch_manager.kv.errors import InvalidKvCacheConfigError

MIN_PRIORITY = 0
MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35

Duration = timedelta | float | int
"""A `timedelta`, or a number of milliseconds."""


class BlockRetention(NamedTuple):
    """What one block gets: its priority, and for how many seconds (`None`: for good)."""

    priority: int
    duration: float | None


DEFAULT_RETENTION = BlockRetention(DEFAULT_PRIORITY, None)


def _seconds(name: str, duration: Duration | None) -> float | None:
    if duration is None:
        return None
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration / 1000.0
    if not seconds > 0:
        raise InvalidKvCacheConfigError(f"{name} is {duration!r}; it must be longer than zero, or None for no end")
    return seconds


def _check_priority(name: str, priority: int) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidKvCacheConfigError(f"{name} is {priority}; it must be within {MIN_PRIORITY} and {MAX_PRIORITY}")


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Retention of one request's blocks.

    Args:
        token_range_retention_configs: ranges of the prompt, not overlapping; tokens in none of them get 35.
        decode_retention_priority: for blocks that hold generated tokens only.
        decode_duration_ms: after so long (counted from when the block is held by nobody) back to 35.

    Raises:
        InvalidKvCacheConfigError: a priority outside 0..100, an empty or negative range, ranges that overlap.
    """

    @dataclass(frozen=True, slots=True)
    class TokenRangeRetentionConfig:
        """Retention of the prompt tokens `[token_start, token_end)`; `token_end` None: up to the prompt's end."""

        token_start: int
        token_end: int | None = None
        priority: int = DEFAULT_PRIORITY
        duration_ms: Duration | None = None

        def __post_init__(self) -> None:
            if self.token_start < 0:
                raise InvalidKvCacheConfigError(f"token_start is {self.token_start}; it must be at least 0")
            if self.token_end is not None and self.token_end <= self.token_start:
                raise InvalidKvCacheConfigError(
                    f"token_end is {self.token_end}; it must be above token_start ({self.token_start}), or None"
                )
            _check_priority("priority", self.priority)
            _seconds("duration_ms", self.duration_ms)

        def touches(self, start: int, end: int) -> bool:
            """Whether the range has a token in `[start, end)`."""
            return self.token_start < end and (self.token_end is None or start < self.token_end)

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: Duration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_range_retention_configs", tuple(self.token_range_retention_configs))
        _check_priority("decode_retention_priority", self.decode_retention_priority)
        _seconds("decode_duration_ms", self.decode_duration_ms)
        in_order = sorted(self.token_range_retention_configs, key=lambda r: r.token_start)
        for before, after in pairwise(in_order):
            if before.token_end is None or before.token_end > after.token_start:
                raise InvalidKvCacheConfigError(
                    f"token ranges [{before.token_start}, {before.token_end}) and [{after.token_start}, "
                    f"{after.token_end}) overlap; each token may be in one range only"
                )

    def for_block(self, start: int, end: int, num_prompt_tokens: int) -> BlockRetention:
        """Retention of the block that holds the positions `[start, end)` of a request."""
        if start >= num_prompt_tokens:
            return BlockRetention(
                self.decode_retention_priority, _seconds("decode_duration_ms", self.decode_duration_ms)
            )
        for token_range in self.token_range_retention_configs:
            if token_range.touches(start, min(end, num_prompt_tokens)):
                return BlockRetention(token_range.priority, _seconds("duration_ms", token_range.duration_ms))
        return DEFAULT_RETENTION


TokenRangeRetentionConfig = KvCacheRetentionConfig.TokenRangeRetentionConfig


def checked_retention(request_id: int, retention: object) -> KvCacheRetentionConfig | None:
    """What a request brought as its retention. Raises `InvalidKvCacheConfigError` when it is anything else."""
    if retention is None or isinstance(retention, KvCacheRetentionConfig):
        return retention
    raise InvalidKvCacheConfigError(
        f"request {request_id}: retention is {retention!r}; it must be a KvCacheRetentionConfig or None"
    )
