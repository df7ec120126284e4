"""What can become of a block that was put away."""

from __future__ import annotations


class BlockLostError(Exception):
    """A tier no longer has a block as it was written: the load is a miss."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """What happened, in a word or two: `damaged`, `short file`. Failures are counted by it."""
