"""What can be wrong with a simulation."""

from __future__ import annotations


class SimulationError(ValueError):
    """A simulation cannot be set up or go on."""


class WorkloadFormatError(SimulationError):
    """A file of arrivals is not what its format asks for: names the file, the line, and what would be right."""


class CostFitError(SimulationError):
    """A trace has too little in it to fit a cost model to."""


class SimulationStalledError(SimulationError):
    """Requests wait, nothing can run, and nothing that could change this is still to come."""
