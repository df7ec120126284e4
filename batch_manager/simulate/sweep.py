"""Which layout of so many instances serves most: contexts and generation together, or parted, and in which ratio.

Each layout serves the same requests at several loads. A layout's capacity is the highest load at which the attainment
(the share of requests served within the service level) is still high enough; the layout with the highest capacity is
recommended (Zhong et al., "DistServe", OSDI 2024, define goodput in this way).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from batch_manager.simulate.cluster_report import ClusterReport
from batch_manager.simulate.errors import SimulationError


class Layout(NamedTuple):
    """How many instances of each role."""

    num_context: int
    num_generation: int
    num_both: int

    @property
    def name(self) -> str:
        if not self.num_context:
            return f"{self.num_both} aggregated"
        name = f"{self.num_context} context + {self.num_generation} generation"
        return name + (f" + {self.num_both} both" if self.num_both else "")


def layouts(num_instances: int) -> list[Layout]:
    """Everything together, then every way to part them."""
    if num_instances < 1:
        raise SimulationError(f"{num_instances} instances; there must be at least 1")
    parted = [Layout(num_context, num_instances - num_context, 0) for num_context in range(1, num_instances)]
    return [Layout(0, 0, num_instances), *parted]


class Measured(NamedTuple):
    """A layout at a load."""

    layout: Layout
    load: float
    """Requests offered a second."""
    report: ClusterReport


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most a layout serves."""

    layout: Layout
    load: float
    """Highest load with enough attainment, requests a second, between the measured ones by straight lines; 0: even the
    lowest was too much."""
    is_beyond: bool
    """Whether the highest load measured was still served, so that the capacity is higher."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """All layouts at all loads."""

    attainment: float
    """Share of requests that must be served within the service level."""
    runs: tuple[Measured, ...]

    def of(self, layout: Layout) -> list[Measured]:
        """Its runs, by load."""
        return sorted((run for run in self.runs if run.layout == layout), key=lambda run: run.load)

    @property
    def layouts(self) -> list[Layout]:
        return list(dict.fromkeys(run.layout for run in self.runs))

    @property
    def capacities(self) -> list[Capacity]:
        """Of each layout, highest first; of equals the simpler one, which comes first."""
        return sorted(map(self._capacity, self.layouts), key=lambda capacity: -capacity.load)

    def _capacity(self, layout: Layout) -> Capacity:
        runs = self.of(layout)
        last = None
        for run in runs:
            if run.report.served_well < self.attainment:
                if last is None:
                    return Capacity(layout, 0.0, False)
                above = last.report.served_well - self.attainment
                share = above / (last.report.served_well - run.report.served_well)
                return Capacity(layout, last.load + share * (run.load - last.load), False)
            last = run
        return Capacity(layout, runs[-1].load, True)

    @property
    def recommended(self) -> Capacity | None:
        """None: no layout serves even the lowest load."""
        best = self.capacities[0]
        return best if best.load else None

    def advice(self) -> str:
        """The recommendation in a sentence."""
        best = self.recommended
        if best is None:
            return f"no layout serves {self.attainment:.0%} of the requests well at any of these loads"
        text = f"recommended: {best.layout.name}, up to {best.load:.2f} requests/s"
        if best.is_beyond:
            return text + " and more: it serves every load measured"
        aggregated = next((c for c in self.capacities if not c.layout.num_context), None)
        if aggregated is not None and aggregated.layout != best.layout and aggregated.load:
            text += f", {best.load / aggregated.load:.2f} times what {aggregated.layout.name} serve"
        return text

    def to_json(self) -> dict[str, object]:
        """The recommendation, capacities, and every run's report."""
        best = self.recommended
        return {
            "attainment": self.attainment,
            "recommended": None if best is None else asdict(best) | {"layout": best.layout._asdict()},
            "capacities": [asdict(c) | {"layout": c.layout._asdict()} for c in self.capacities],
            "runs": [
                {"layout": run.layout._asdict(), "load": run.load, "report": run.report.to_json()} for run in self.runs
            ],
        }

    def table(self) -> str:
        """Goodput and attainment of each layout at each load, capacities, the recommendation."""
        loads = sorted({run.load for run in self.runs})
        width = max(len(layout.name) for layout in self.layouts) + 2
        lines = ["goodput, requests/s (attainment)", f"{'load':>{width}}" + "".join(f"{load:>16.2f}" for load in loads)]
        for layout in self.layouts:
            cells = {run.load: f"{run.report.goodput:.2f} ({run.report.served_well:.0%})" for run in self.of(layout)}
            lines.append(f"{layout.name:<{width}}" + "".join(f"{cells.get(load, ''):>16}" for load in loads))
        lines += ["", f"highest load with {self.attainment:.0%} served well, requests/s"]
        lines += [
            f"{capacity.layout.name:<{width}}{'>' if capacity.is_beyond else '':>4}{capacity.load:8.2f}"
            for capacity in self.capacities
        ]
        return "\n".join([*lines, "", self.advice()]) + "\n"


def sweep(
    run: Callable[[Layout, float], ClusterReport],
    layouts: Sequence[Layout],
    loads: Iterable[float],
    attainment: float,
) -> Sweep:
    """Run every layout at every load.

    Args:
        run: one run of a layout at a load, requests a second.
        attainment: above 0, at most 1.
    """
    if not 0 < attainment <= 1:
        raise SimulationError(f"attainment is {attainment}; it must be above 0 and at most 1")

    def measure() -> Iterator[Measured]:
        for load in sorted(loads):
            for layout in layouts:
                yield Measured(layout, load, run(layout, load))

    return Sweep(attainment, tuple(measure()))
