"""Keeps MAX_UTILIZATION from thrashing: pauses make admission careful, undisturbed completions make it bold again."""

from __future__ import annotations


class PauseGovernor:
    """How much of the blocks that running requests may still take is kept free when another one is admitted.

    `caution` is that share. It starts at 0 (admit whatever fits this step), rises with every pause and falls with
    every request that ends, so that it settles where pauses are rare, wherever that is for the requests' real lengths.
    """

    RISE = 0.1
    FALL = 0.98

    def __init__(self) -> None:
        self.caution = 0.0

    def headroom(self, num_reserved_blocks: int) -> int:
        """Blocks to keep free for requests that may still take `num_reserved_blocks`."""
        return int(self.caution * num_reserved_blocks)

    def on_pause(self) -> None:
        self.caution = min(1.0, self.caution + self.RISE)

    def on_finish(self) -> None:
        self.caution *= self.FALL
