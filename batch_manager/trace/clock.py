"""Clocks: one that stands still within a call, one that is set by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InstantClock:
    """Seconds that stand still within a call.

    Whatever a call decides by time it decides by one reading, so one number per call is enough to decide the same
    again. Give the same clock to the KvCacheManager, whose retention durations end by it.
    """

    def __init__(self, base: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._frozen: float | None = None

    def __call__(self) -> float:
        return self._base() if self._frozen is None else self._frozen

    @property
    def is_frozen(self) -> bool:
        """Whether a call is going on."""
        return self._frozen is not None

    @contextmanager
    def instant(self) -> Iterator[float]:
        """Stand still; gives the time at which."""
        self._frozen = now = self._base()
        try:
            yield now
        finally:
            self._frozen = None


class ManualClock:
    """Seconds that pass only when `now` is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
