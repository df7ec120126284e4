"""What a request cost: written by the BatchManager while the request lives, read when it is finished."""

from __future__ import annotations

from typing import NamedTuple

from batch_manager.reasons import WaitCode


class Pause(NamedTuple):
    """A request lost its blocks."""

    iteration: int
    reason: WaitCode
    beneficiary: int
    """Id of the request that needed the blocks."""
    num_lost_tokens: int
    """Computed tokens whose keys and values were given up."""


class Receipt:
    """Tokens, pauses and time of one request. Times are seconds, block-seconds count every block in its table."""

    __slots__ = (
        "admission_time",
        "arrival_time",
        "block_seconds",
        "blocks_since",
        "finish_time",
        "high_water",
        "num_accepted_draft_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_recomputed_tokens",
        "num_reused_tokens",
        "num_transferred_tokens",
        "paused_seconds",
        "paused_since",
        "pauses",
        "queue_seconds",
    )

    def __init__(self) -> None:
        self.arrival_time = 0.0
        self.admission_time: float | None = None
        """When it was first scheduled."""
        self.finish_time: float | None = None
        self.queue_seconds = 0.0
        """From arrival until it was first scheduled, or until it ended unscheduled."""
        self.paused_seconds = 0.0
        self.num_computed_tokens = 0
        """Positions whose keys and values were computed and not taken back, every recomputation counted. For one that
        ended by length and was never paused, reused and computed ones are prompt + `max_new_tokens` - 1; where a stop
        came first, what was accepted or in flight behind it counts too."""
        self.num_reused_tokens = 0
        """Positions found in the cache, over all (re)starts."""
        self.num_recomputed_tokens = 0
        """Of the computed ones, those that had been computed before and were lost in a pause."""
        self.num_transferred_tokens = 0
        """Positions received from another instance; written by whoever receives them."""
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.pauses: list[Pause] = []
        self.block_seconds = 0.0
        self.high_water = 0
        """Most positions that were computed at any time."""
        self.blocks_since = 0.0
        """Up to when `block_seconds` is counted."""
        self.paused_since = 0.0

    def start(self, now: float, num_reused_tokens: int) -> None:
        """The request was admitted."""
        if self.admission_time is None:
            self.admission_time = now
            self.queue_seconds = now - self.arrival_time
        else:
            self.paused_seconds += now - self.paused_since
        self.num_reused_tokens += num_reused_tokens
        self.blocks_since = now

    def hold(self, now: float, num_blocks: int) -> None:
        """Up to `now` the request has held `num_blocks`."""
        self.block_seconds += num_blocks * (now - self.blocks_since)
        self.blocks_since = now

    def stop(self, now: float, num_blocks: int, num_reused_tokens: int, num_computed_tokens: int) -> None:
        """The request gives its blocks back, with so many positions reused and (in all) computed."""
        self.hold(now, num_blocks)
        self.num_computed_tokens += num_computed_tokens - num_reused_tokens
        self.num_recomputed_tokens += max(0, min(num_computed_tokens, self.high_water) - num_reused_tokens)
        self.high_water = max(self.high_water, num_computed_tokens)
        self.paused_since = now

    def take_back(self, num_tokens: int) -> None:
        """The last so many of the positions given up in the last pause were drafts that proved wrong."""
        self.num_computed_tokens -= num_tokens
        self.high_water -= num_tokens
        pause = self.pauses[-1]
        self.pauses[-1] = pause._replace(num_lost_tokens=pause.num_lost_tokens - num_tokens)

    def finish(self, now: float, is_paused: bool) -> None:
        """The request ended; `is_paused`: it held no blocks, after having been admitted."""
        self.finish_time = now
        if self.admission_time is None:
            self.queue_seconds = now - self.arrival_time
        elif is_paused:
            self.paused_seconds += now - self.paused_since
