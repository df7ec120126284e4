"""Whether fetching is cheaper than computing, by what both were seen to take."""

from __future__ import annotations

import threading

_WEIGHT = 0.3
"""Of the newest observation."""


class CostMeter:
    """Seconds to fetch from each peer and to compute here, measured as it goes. Safe to use from any thread."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}
        self._seconds_per_token: float | None = None
        self._lock = threading.Lock()

    def note_transfer(self, address: str, num_bytes: int, seconds: float) -> None:
        """A context came from the peer at `address`, first word to last byte."""
        if num_bytes:
            with self._lock:
                known = self._seconds_per_byte.get(address)
                self._seconds_per_byte[address] = _average(known, seconds / num_bytes)

    def note_context(self, num_tokens: int, seconds: float) -> None:
        """A step that computed a context had so many tokens in all."""
        if num_tokens:
            with self._lock:
                self._seconds_per_token = _average(self._seconds_per_token, seconds / num_tokens)

    def is_fetching_cheaper(self, address: str, num_bytes: int, num_tokens: int) -> bool:
        """Whether to fetch rather than compute. What has never been tried is tried once, to be known."""
        per_byte, per_token = self._seconds_per_byte.get(address), self._seconds_per_token
        if per_byte is None or per_token is None:
            return True
        return num_bytes * per_byte < num_tokens * per_token


def _average(known: float | None, observed: float) -> float:
    return observed if known is None else (1 - _WEIGHT) * known + _WEIGHT * observed
