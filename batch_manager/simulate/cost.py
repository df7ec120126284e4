"""How long a step takes: cost models and what they look at."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from batch_manager.plan import Phase
from batch_manager.simulate.errors import SimulationError


class StepShape(NamedTuple):
    """What of a plan decides how long it takes."""

    num_context_tokens: int
    """Query rows of contexts, replayed ones included."""
    num_generation_rows: int
    """Query rows of generation requests, drafts and replayed ones included."""
    num_attended_tokens: int
    """Pairs of a query row and a position it attends to, summed over all rows: what attention computes."""
    num_kv_tokens: int
    """Positions whose keys and values are read, summed over all sequences: what attention loads."""


class ShapedEntry(Protocol):
    """What `step_shape` reads of a scheduled request, planned or recorded."""

    @property
    def start(self) -> int: ...
    @property
    def num_scheduled_tokens(self) -> int: ...
    @property
    def num_replayed_tokens(self) -> int: ...
    @property
    def phase(self) -> Phase: ...


def step_shape(scheduled: Iterable[ShapedEntry]) -> StepShape:
    context_tokens = generation_rows = attended = kv_tokens = 0
    for entry in scheduled:
        size = entry.num_scheduled_tokens
        end = entry.start + size
        if size == 1 and not entry.num_replayed_tokens:
            attended += end
            rows = 1
        else:
            rows = size + entry.num_replayed_tokens
            attended += rows * end - rows * (rows - 1) // 2
        kv_tokens += end
        if entry.phase is Phase.CONTEXT:
            context_tokens += rows
        else:
            generation_rows += rows
    return StepShape(context_tokens, generation_rows, attended, kv_tokens)


class CostModel(Protocol):
    @property
    def overhead(self) -> float:
        """Seconds between the end of a step and the start of the next, spent outside the engine."""
        ...

    def seconds(self, shape: StepShape) -> float:
        """Duration of a step."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A constant, and so many seconds for each unit of the step's shape."""

    constant: float
    per_context_token: float = 0.0
    per_generation_row: float = 0.0
    per_attended_token: float = 0.0
    per_kv_token: float = 0.0
    overhead: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        return (
            self.constant
            + self.per_context_token * shape.num_context_tokens
            + self.per_generation_row * shape.num_generation_rows
            + self.per_attended_token * shape.num_attended_tokens
            + self.per_kv_token * shape.num_kv_tokens
        )


class ScatteredCost:
    """A cost model whose steps take longer or shorter by factors that were measured, drawn at random.

    Waiting lines grow with the scatter of the steps, not only with their mean. Steps with contexts have factors of
    their own.
    """

    def __init__(
        self,
        cost: LinearCost,
        context_factors: Sequence[float],
        generation_factors: Sequence[float],
        seed: int = 0,
    ) -> None:
        """Empty factors: these steps do not scatter."""
        self.cost = cost
        self.overhead = cost.overhead
        self._context_factors = context_factors or (1.0,)
        self._generation_factors = generation_factors or (1.0,)
        self._source = random.Random(seed)

    def seconds(self, shape: StepShape) -> float:
        factors = self._context_factors if shape.num_context_tokens else self._generation_factors
        return self.cost.seconds(shape) * self._source.choice(factors)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What of a dense model decides how long a step takes."""

    num_parameters: float
    """That take part in every token."""
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    bytes_per_parameter: float = 2.0
    bytes_per_kv_element: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.bytes_per_kv_element


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a device can do at best, and how much of that a step gets."""

    flops_per_second: float
    bytes_per_second: float
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    step_overhead: float = 0.0
    """Seconds between steps."""


class RooflineCost:
    """A step takes as long as its arithmetic or its memory traffic, whichever takes longer.

    Arithmetic: 2 operations for each parameter and row, 4 for each attended position, head and head element. Traffic:
    the weights once, keys and values of every sequence once, those of the new rows written (Williams, Waterman and
    Patterson, "Roofline", CACM 2009).
    """

    def __init__(self, model: ModelFigures, device: DeviceFigures) -> None:
        for name in ("flops_per_second", "bytes_per_second", "compute_efficiency", "memory_efficiency"):
            if not getattr(device, name) > 0:
                raise SimulationError(f"{name} is {getattr(device, name)}; it must be above 0")
        self.overhead = device.step_overhead
        flops = device.flops_per_second * device.compute_efficiency
        bandwidth = device.bytes_per_second * device.memory_efficiency
        self._seconds_per_row = 2 * model.num_parameters / flops
        self._seconds_per_pair = 4 * model.num_layers * model.num_attention_heads * model.head_size / flops
        self._seconds_for_weights = model.num_parameters * model.bytes_per_parameter / bandwidth
        self._seconds_per_kv_token = model.kv_bytes_per_token / bandwidth

    def seconds(self, shape: StepShape) -> float:
        rows = shape.num_context_tokens + shape.num_generation_rows
        compute = rows * self._seconds_per_row + shape.num_attended_tokens * self._seconds_per_pair
        memory = self._seconds_for_weights + (shape.num_kv_tokens + rows) * self._seconds_per_kv_token
        return max(compute, memory)
