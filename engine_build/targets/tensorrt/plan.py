"""From an ONNX network to a serialized plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from engine_build.manifest import BuildConfig, TensorRtConfig
from engine_build.targets.interface import TargetError
from engine_build.targets.tensorrt.emitter import NetworkEmitter, Operator
from engine_build.targets.tensorrt.messages import (
    ProgressCallback,
    explain,
    make_logger,
    make_progress_monitor,
)
from engine_build.targets.tensorrt.profiles import SizeRange, add_profiles
from engine_build.targets.tensorrt.weight_file import ConstantReader


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to build, for either package."""

    model: onnx.ModelProto
    """The network; its weights in external data beside `directory`."""
    directory: Path
    """Where the network's weights are."""
    operators: dict[tuple[str, str], Operator]
    ranges: list[dict[str, SizeRange]]
    build_config: BuildConfig
    stage: str
    """What progress is reported as."""


def build_plan(
    trt: Any,
    request: PlanRequest,
    configure: Callable[[Any, Any], None],
    report: ProgressCallback,
) -> memoryview:
    """Build one plan.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`; for the former a GPU has been found.
        request: what to build.
        configure: called with the module and the `IBuilderConfig`: what only this package has.
        report: called with progress.

    Raises:
        TargetError: the network or its configuration is refused, or the build fails.
        KeyboardInterrupt: the build was interrupted.
    """
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    constants = ConstantReader(request.model, request.directory)
    try:
        NetworkEmitter(trt, network, constants, request.operators).emit(request.model.graph)
    except TargetError as error:
        raise TargetError(f"{error} ({explain(logger.errors)})") from error
    config = builder.create_builder_config()
    assert request.build_config.tensorrt is not None  # both targets' builds have one
    _set_flags(trt, config, request.build_config.tensorrt)
    monitor = make_progress_monitor(trt, request.stage, report)
    config.progress_monitor = monitor
    add_profiles(builder, config, _input_shapes(request.model.graph), request.ranges)
    configure(trt, config)
    plan = builder.build_serialized_network(network, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    if plan is None:
        raise TargetError(f"{trt.__name__} cannot build the plan: {explain(logger.errors)}")
    return memoryview(plan)


def _set_flags(trt: Any, config: Any, settings: TensorRtConfig) -> None:
    verbosity = settings.profiling_verbosity.upper()
    config.profiling_verbosity = getattr(trt.ProfilingVerbosity, verbosity)
    flags = {"STRIP_PLAN": settings.strip_plan, "WEIGHT_STREAMING": settings.weight_streaming}
    for name, wanted in flags.items():
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, name))


def _input_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int | str, ...]]:
    return {
        value.name: tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim)
        for value in graph.input
    }
