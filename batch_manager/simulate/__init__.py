"""The production BatchManager in virtual time: workloads, cost models, reports."""

from batch_manager.simulate.cost import (
    CostModel,
    DeviceFigures,
    LinearCost,
    ModelFigures,
    RooflineCost,
    ScatteredCost,
    StepShape,
    step_shape,
)
from batch_manager.simulate.errors import (
    CostFitError,
    SimulationError,
    SimulationStalledError,
    WorkloadFormatError,
)
from batch_manager.simulate.fit import CostFit, fit_cost
from batch_manager.simulate.histogram import Histogram
from batch_manager.simulate.instance import SimulatedSpeculation
from batch_manager.simulate.metrics import RunMetrics, ServiceLevel
from batch_manager.simulate.public_traces import azure, burst_gpt, mooncake, recorded
from batch_manager.simulate.report import Latency, RunReport
from batch_manager.simulate.series import RunSeries
from batch_manager.simulate.simulator import Simulation
from batch_manager.simulate.workload import (
    OfferedRequest,
    faster,
    fixed,
    log_normal,
    synthetic,
    take,
    uniform,
    with_max_new_tokens,
)

__all__ = [
    "CostFit",
    "CostFitError",
    "CostModel",
    "DeviceFigures",
    "Histogram",
    "Latency",
    "LinearCost",
    "ModelFigures",
    "OfferedRequest",
    "RooflineCost",
    "RunMetrics",
    "RunReport",
    "RunSeries",
    "ScatteredCost",
    "ServiceLevel",
    "SimulatedSpeculation",
    "Simulation",
    "SimulationError",
    "SimulationStalledError",
    "StepShape",
    "WorkloadFormatError",
    "azure",
    "burst_gpt",
    "faster",
    "fit_cost",
    "fixed",
    "log_normal",
    "mooncake",
    "recorded",
    "step_shape",
    "synthetic",
    "take",
    "uniform",
    "with_max_new_tokens",
]
