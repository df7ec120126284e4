"""The production BatchManager in virtual time: workloads, cost models, reports."""

from batch_manager.simulate.cluster import Cluster, Death
from batch_manager.simulate.cluster_metrics import ClusterMetrics
from batch_manager.simulate.cluster_report import ClusterReport, InstanceReport
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
from batch_manager.simulate.member import InstanceSpec, Role
from batch_manager.simulate.metrics import RunMetrics, ServiceLevel
from batch_manager.simulate.network import NetworkFigures
from batch_manager.simulate.public_traces import azure, burst_gpt, mooncake, recorded
from batch_manager.simulate.report import Latency, RunReport
from batch_manager.simulate.routing import RouterPolicy
from batch_manager.simulate.series import RunSeries
from batch_manager.simulate.simulator import Simulation
from batch_manager.simulate.sweep import Capacity, Layout, Measured, Sweep, layouts, sweep
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
    "Capacity",
    "Cluster",
    "ClusterMetrics",
    "ClusterReport",
    "CostFit",
    "CostFitError",
    "CostModel",
    "Death",
    "DeviceFigures",
    "Histogram",
    "InstanceReport",
    "InstanceSpec",
    "Latency",
    "Layout",
    "LinearCost",
    "Measured",
    "ModelFigures",
    "NetworkFigures",
    "OfferedRequest",
    "Role",
    "RooflineCost",
    "RouterPolicy",
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
    "Sweep",
    "WorkloadFormatError",
    "azure",
    "burst_gpt",
    "faster",
    "fit_cost",
    "fixed",
    "layouts",
    "log_normal",
    "mooncake",
    "recorded",
    "step_shape",
    "sweep",
    "synthetic",
    "take",
    "uniform",
    "with_max_new_tokens",
]
