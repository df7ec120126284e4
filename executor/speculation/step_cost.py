"""What a step costs by its rows, learned from the steps that were run."""

from __future__ import annotations

from collections.abc import Callable

_ROWS_OF_FIXED_COST = 16.0
"""First guess: on a CPU, SmolLM2-135M in bfloat16 takes 15 ms for one row and about 0.9 ms for each further one."""

_ROWS_OF_CHANGE = 5.0
"""First guess of what another number of rows costs: OpenVINO takes about 5 ms to make every layer ready for it."""

_FIXED_ROWS_RANGE = (4.0, 512.0)
"""What noise may not push the estimate beyond: a small model on one core, a large one on a data-centre GPU."""

_MEMORY = 0.995
"""Weight of the past for each step."""

_MEMORY_OF_CHANGES = 0.8
"""Weight of the past for each step of more rows than the one before."""

_MOST_ROWS_OF_CHANGE = 16.0
"""What noise may not push that estimate beyond."""

_OUTLIER = 1.5
"""A step that takes so many times what was foreseen was held up by something else, and counts as this many times."""

_GUESS_SPREAD = 16.0**2
"""Spread of rows (sum of squared distances from their mean) at which steps and the first guess weigh the same."""


class StepCost:
    """A step of `T` rows takes `(F + padded(T)) * s` seconds, since the weights are read once however many rows there
    are. F, the rows of fixed cost, is the intercept over the slope of a line through the latest steps.

    A step of more rows than the one before may take longer, since an engine may have to make itself ready for another
    number. What such steps take beyond the line is learned too, and counts twice: sooner or later the number falls
    back, which takes as long."""

    def __init__(
        self,
        padded_rows: Callable[[int], int] = lambda num_rows: num_rows,
        *,
        rows_of_fixed_cost: float = _ROWS_OF_FIXED_COST,
    ) -> None:
        """Begin with a guess.

        Args:
            padded_rows: rows that the engine computes for a step of so many.
            rows_of_fixed_cost: F until steps say otherwise.
        """
        self._padded_rows = padded_rows
        self._guess = rows_of_fixed_cost
        self.rows_of_fixed_cost = rows_of_fixed_cost
        self.rows_of_change = _ROWS_OF_CHANGE
        """What more rows than in the step before cost beyond themselves, in rows; below 0 it means nothing."""
        self._last_rows = 0.0
        self._costs: dict[int, float] = {}
        """By rows; every sequence of a batch asks for the same few."""
        self._weight = 0.0
        """Of all steps so far, the latest one counted as 1."""
        self._mean_rows = 0.0
        self._mean_seconds = 0.0
        self._spread = 0.0
        """Sum of squared distances of rows from their mean."""
        self._product = 0.0
        """The same of distances of rows times those of seconds."""

    def __call__(self, num_rows: int) -> float:
        """The cost of a step, in rows, if it came next."""
        cost = self._costs.get(num_rows)
        if cost is None:
            rows = self._padded_rows(num_rows)
            change = 2 * max(0.0, self.rows_of_change) if 0 < self._last_rows < rows else 0.0
            cost = self._costs[num_rows] = self.rows_of_fixed_cost + rows + change
        return cost

    def learn(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, every sequence sampled, took so long."""
        self._costs.clear()
        rows = float(self._padded_rows(num_rows))
        before, self._last_rows = self._last_rows, rows
        if self._weight:
            slope = self._slope()
            foreseen = self._mean_seconds + slope * (rows - self._mean_rows)
            seconds = min(seconds, _OUTLIER * foreseen)
            if rows > before and slope > 0:
                more = (seconds - foreseen) / slope
                more = min(_MOST_ROWS_OF_CHANGE, max(-_MOST_ROWS_OF_CHANGE, more))
                self.rows_of_change += (1 - _MEMORY_OF_CHANGES) * (more - self.rows_of_change)
                seconds -= max(0.0, self.rows_of_change) * slope
        self._weight = _MEMORY * self._weight + 1
        row_distance = rows - self._mean_rows
        self._mean_rows += row_distance / self._weight
        self._spread = _MEMORY * self._spread + row_distance * (rows - self._mean_rows)
        self._mean_seconds += (seconds - self._mean_seconds) / self._weight
        self._product = _MEMORY * self._product + row_distance * (seconds - self._mean_seconds)
        slope = self._slope()
        least, most = _FIXED_ROWS_RANGE
        fixed = most if slope <= 0 else self._mean_seconds / slope - self._mean_rows
        self.rows_of_fixed_cost = min(most, max(least, fixed))

    def _slope(self) -> float:
        """Seconds for each row: of the line through the steps, drawn towards the guess as far as they are of one
        size."""
        guess = self._mean_seconds / (self._guess + self._mean_rows)
        return (self._product + _GUESS_SPREAD * guess) / (self._spread + _GUESS_SPREAD)
