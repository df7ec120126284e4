"""Checks that several targets share."""

from __future__ import annotations

from engine_build.manifest import BuildConfig
from engine_build.network.graph import DATA_FILE, MODEL_FILE
from engine_build.targets.interface import TargetError, TensorRtOptions

NETWORK_FILES = (MODEL_FILE, DATA_FILE)
"""What targets need that read the ONNX network when they start."""


def check_single_device(target: str, build_config: BuildConfig) -> None:
    """Raises `TargetError` for what only plans for GPUs have."""
    if build_config.tp_size * build_config.pp_size > 1:
        raise TargetError(
            f"tp_size {build_config.tp_size} x pp_size {build_config.pp_size} is not supported; "
            f"target {target} runs on one device"
        )


def refuse_tensorrt_options(target: str, options: TensorRtOptions | None) -> None:
    """Raises `TargetError` when there are any."""
    if options is not None:
        raise TargetError(
            "compute_capability, kv_cache_dtype, strip_plan, weight_streaming and profiling_verbosity are for the "
            f"targets tensorrt and tensorrt-rtx, not for {target}"
        )
