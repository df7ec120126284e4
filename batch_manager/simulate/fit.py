"""Fits a cost model to a recorded trace by least squares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batch_manager.simulate.cost import LinearCost, ScatteredCost, StepShape, step_shape
from batch_manager.simulate.errors import CostFitError
from batch_manager.trace.reader import TraceReader
from batch_manager.trace.records import Arrival, Cancellation, Failure, Planning, Record, Result

MIN_STEPS = 20
"""Fewer measured steps are refused: five coefficients are fitted to them."""

UNIT_COSTS = ("per_context_token", "per_generation_row", "per_attended_token", "per_kv_token")
"""Fields of `LinearCost`, in the order of `StepShape`'s."""


class MeasuredStep(NamedTuple):
    shape: StepShape
    seconds: float
    """From the plan, or the end of the step before if that came later, to the update."""
    overhead: float | None
    """Seconds from the update before to the plan, if there was work all the time."""


class CostFit(NamedTuple):
    cost: LinearCost
    """The mean of a step."""
    context_factors: list[float]
    generation_factors: list[float]
    """Measured / fitted, of each step with and without contexts; on average they leave the total as it is."""
    num_steps: int
    mean_error: float
    """Mean of |fitted - measured|, as a share of the mean measured step."""
    total_error: float
    """(sum of fitted - sum of measured) / sum of measured."""

    def scattered(self, seed: int = 0) -> ScatteredCost:
        """The cost model with the scatter of the measured steps."""
        return ScatteredCost(self.cost, self.context_factors, self.generation_factors, seed)


def measured_steps(records: Iterable[Record]) -> Iterator[MeasuredStep]:
    """The steps of a recorded run that were carried out, in order."""
    live: set[int] = set()
    planned: dict[int, tuple[Planning, float | None]] = {}
    last_update: float | None = None
    for record in records:
        match record:
            case Arrival(refused=None):
                live.add(record.request.request_id)
            case Cancellation():
                live.discard(record.request_id)
            case Planning():
                live.difference_update(record.timed_out)
                if record.rows:
                    gap = None if last_update is None or planned else record.now - last_update
                    planned[record.iteration] = (record, gap)
            case Failure():
                live.difference_update(row.request_id for row in planned.pop(record.iteration)[0].rows)
                last_update = None
            case Result():
                planning, gap = planned.pop(record.iteration)
                begin = planning.now if last_update is None else max(planning.now, last_update)
                yield MeasuredStep(step_shape(planning.rows), record.now - begin, gap)
                live.difference_update(record.ended)
                last_update = record.now if live else None


def fit_cost(path: str | Path) -> CostFit:
    """Fit a `LinearCost` to a recorded run.

    Raises:
        CostFitError: the trace has fewer than `MIN_STEPS` steps.
        TraceFormatError: the trace cannot be read.
    """
    with TraceReader(path) as reader:
        return fit_steps(list(measured_steps(reader)))


def fit_steps(steps: list[MeasuredStep]) -> CostFit:
    """Least squares with coefficients of at least 0: no step gets cheaper by doing more.

    Raises:
        CostFitError: there are fewer than `MIN_STEPS` steps.
    """
    if len(steps) < MIN_STEPS:
        raise CostFitError(f"the trace has {len(steps)} steps; at least {MIN_STEPS} are needed to fit a cost model")
    shapes = np.array([(1, *step.shape) for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    coefficients = _nonnegative_least_squares(shapes, seconds)
    gaps = [step.overhead for step in steps if step.overhead is not None]
    overhead = statistics.median(gaps) if gaps else 0.0
    constant, *per_unit = map(float, coefficients)
    cost = LinearCost(constant, **dict(zip(UNIT_COSTS, per_unit, strict=True)), overhead=overhead)
    fitted = shapes @ coefficients
    total = float(seconds.sum())
    has_context = shapes[:, 1] > 0
    return CostFit(
        cost,
        _factors(fitted[has_context], seconds[has_context]),
        _factors(fitted[~has_context], seconds[~has_context]),
        len(steps),
        float(np.abs(fitted - seconds).sum()) / total,
        float(fitted.sum() - total) / total,
    )


def _factors(fitted: NDArray[np.float64], measured: NDArray[np.float64]) -> list[float]:
    if not len(fitted):
        return []
    factors = measured / np.maximum(fitted, 1e-9)
    factors *= measured.sum() / (fitted.sum() * factors.mean())
    return [float(factor) for factor in factors]


def _nonnegative_least_squares(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[columns] coefficients >= 0 that minimize |rows @ x - values| (Lawson and Hanson's active set)."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    num_columns = rows.shape[1]
    solution = np.zeros(num_columns)
    passive = np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * float(np.abs(scaled.T @ values).max() or 1.0)
    for _ in range(10 * num_columns):
        gradient = scaled.T @ (values - scaled @ solution)
        gradient[passive] = -np.inf
        if gradient.max() <= tolerance:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], values, rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                break
            step = float((solution[negative] / (solution[negative] - trial[negative])).min())
            solution += step * (trial - solution)
            passive &= solution > 1e-15
        solution = trial
    coefficients: NDArray[np.float64] = solution / scale
    return coefficients
