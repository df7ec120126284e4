"""From a target's name to the target."""

from __future__ import annotations

from engine_build.targets import TARGET_NAMES
from engine_build.targets.interface import Target, TargetError
from engine_build.targets.openvino import OpenVinoTarget
from engine_build.targets.reference import ReferenceTarget
from engine_build.targets.tensorrt.full import TensorRtTarget
from engine_build.targets.tensorrt.rtx import TensorRtRtxTarget


def select_target(name: str) -> Target:
    """Raises `TargetError` for a name that is not in `TARGET_NAMES`."""
    targets: tuple[Target, ...] = (OpenVinoTarget(), ReferenceTarget(), TensorRtTarget(), TensorRtRtxTarget())
    for target in targets:
        if target.name == name:
            return target
    raise TargetError(f"target {name!r} is unknown; supported are {', '.join(TARGET_NAMES)}")
