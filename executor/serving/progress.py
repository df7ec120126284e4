"""Health means progress: a server with work whose iterations have stopped is not healthy."""

from __future__ import annotations

import time

from executor.serving.interface import ServedExecutor


class ProgressMonitor:
    """Tells whether an executor that has work finishes iterations."""

    def __init__(self, executor: ServedExecutor, *, limit_seconds: float = 30.0) -> None:
        """Watch an executor; it is stalled when it has work and finished no iteration for `limit_seconds`."""
        self.limit_seconds = limit_seconds
        self._executor = executor
        self._idle_until = time.monotonic()

    def seconds_since_progress(self) -> float:
        """Seconds since an iteration finished or work arrived; 0 while there is no work, or while an operator keeps it
        from being done. Ask it regularly: it is by asking that it knows when work arrived."""
        now = time.monotonic()
        if self._executor.num_unfinished_requests == 0 or self._executor.is_paused:
            self._idle_until = now
            return 0.0
        return max(0.0, now - max(self._idle_until, self._executor.last_progress))

    @property
    def is_paused(self) -> bool:
        return self._executor.is_paused

    @property
    def is_stalled(self) -> bool:
        return self.seconds_since_progress() > self.limit_seconds
