"""Whether a plan can run here, told from its manifest and this machine, before anything is loaded or allocated.

TensorRT checks some of this itself when it deserializes, in several lines of its log, and crashes on the rest.
"""

from __future__ import annotations

from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from engine_build.targets.tensorrt.device import Device, find_device
from engine_build.targets.tensorrt.package import TENSORRT, TENSORRT_RTX

PACKAGES = {package.target: package for package in (TENSORRT, TENSORRT_RTX)}


def check_plan_here(directory: EngineDirectory, device_index: int = 0) -> Device:
    """Check a plan against this machine, its files' checksums included; give the device it will run on.

    Args:
        directory: the plan's.
        device_index: which GPU that is.

    Raises:
        EngineDirectoryError: the plan is of another version, for another device, or not what was written.
        TargetError: TensorRT is not installed, or there is no GPU.
    """
    check_manifest(directory)
    device = find_device(device_index)
    check_device(directory, device)
    EngineDirectory.open(directory.path, verify=True)
    return device


def check_manifest(directory: EngineDirectory) -> None:
    """Check what needs no GPU, and takes no time.

    Raises:
        EngineDirectoryError: the plan is of another version, for several devices, or without weights.
        TargetError: TensorRT is not installed.
    """
    check_version(directory, str(PACKAGES[directory.target].load().__version__))
    check_whole(directory)


def check_version(directory: EngineDirectory, installed: str) -> None:
    """Raises `EngineDirectoryError` when the plan was built by another version of TensorRT than is installed."""
    package = PACKAGES[directory.target]
    built = directory.manifest.builder_versions.get(package.module)
    if built != installed:
        raise EngineDirectoryError(
            f"{directory.path} was built with {package.module} {built}, {installed} is installed: build it again, or "
            f"pip install '{package.distribution}=={built}'"
        )


def check_whole(directory: EngineDirectory) -> None:
    """Raises `EngineDirectoryError` for a plan of several devices, or without weights."""
    build_config = directory.build_config
    ranks = build_config.tp_size * build_config.pp_size
    if ranks > 1:
        raise EngineDirectoryError(f"{directory.path} was built for {ranks} devices, an Executor runs one")
    settings = build_config.tensorrt
    if settings is not None and settings.strip_plan:
        raise EngineDirectoryError(
            f"{directory.path} was built with --strip_plan: it has no weights, and an Executor does not refit plans"
        )


def check_device(directory: EngineDirectory, device: Device) -> None:
    """Raises `EngineDirectoryError` for a plan of other device generations."""
    settings = directory.build_config.tensorrt
    built = () if settings is None else settings.compute_capabilities
    if device.compute_capability not in built:
        raise EngineDirectoryError(
            f"{directory.path} was built for compute capability {', '.join(built)}, {device.name} has "
            f"{device.compute_capability}: build it again with --compute_capability {device.compute_capability}"
        )
