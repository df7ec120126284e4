"""Percentiles of any number of durations in bounded memory."""

from __future__ import annotations

import math

RELATIVE_ERROR = 0.005
"""Of a percentile, at most."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = math.log(_GROWTH)
_SMALLEST = 1e-6
"""Seconds; what is shorter counts as zero."""


class Histogram:
    """Counts of seconds in buckets that grow by a constant factor (DDSketch: Masson, Rim and Lee, VLDB 2019).

    Mean and maximum are exact. Durations from 1 us to a year fill at most 3,200 buckets.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        """Sum of all values, seconds."""
        self.maximum = 0.0
        self._num_zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `seconds`, `count` times. Raises `ValueError` when it is negative or not a number."""
        if not seconds >= 0:
            raise ValueError(f"a duration must be at least 0 seconds, not {seconds}")
        self.count += count
        self.total += seconds * count
        self.maximum = max(self.maximum, seconds)
        if seconds < _SMALLEST:
            self._num_zeros += count
        else:
            bucket = math.ceil(math.log(seconds) / _LOG_GROWTH)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    @property
    def mean(self) -> float:
        """0 when nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest value that at least `percent` of all values do not exceed; 0 when nothing was counted."""
        rank = max(1, math.ceil(self.count * percent / 100))
        if rank <= self._num_zeros or not self.count:
            return 0.0
        seen = self._num_zeros
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                middle: float = 2 * _GROWTH**bucket / (1 + _GROWTH)
                return min(middle, self.maximum)
        return self.maximum

    def curve(self) -> list[tuple[float, float]]:
        """The distribution as points (seconds, share of values up to it), one a bucket."""
        points = [(0.0, self._num_zeros / self.count)] if self._num_zeros else []
        seen = self._num_zeros
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((_GROWTH**bucket, seen / self.count))
        return points
