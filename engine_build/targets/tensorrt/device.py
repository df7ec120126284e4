"""Which GPU is here. Asked before anything of TensorRT is made: without a driver that returns null, or crashes."""

from __future__ import annotations

from typing import NamedTuple

from engine_build.targets.interface import TargetError


class Device(NamedTuple):
    """A CUDA device."""

    name: str
    compute_capability: str
    """`major.minor`."""
    memory: int
    """Bytes."""


def count_devices() -> int:
    """How many GPUs the driver finds; asked before anything of CUDA is created, which without a driver may crash.

    Raises:
        TargetError: no driver, or no package to ask with.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise TargetError(
            "a GPU cannot be looked for without the package cuda-bindings: pip install 'inflight-executor[tensorrt]'"
        ) from error
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess:
        reason = runtime.cudaError_t(status).name
        raise TargetError(f"no NVIDIA GPU can be used here ({reason}): a driver of CUDA 13 (r580 or newer) is needed")
    return int(count)


def find_device(index: int = 0) -> Device:
    """Look a GPU up, by default the first.

    Raises:
        TargetError: it is not there, no driver, or no package to ask with.
    """
    count = count_devices()
    from cuda.bindings import runtime

    if count == 0:
        raise TargetError("no NVIDIA GPU can be used here: the driver finds none")
    if index >= count:
        raise TargetError(f"there is no GPU {index}: the driver finds {count}, and counts from 0")
    status, properties = runtime.cudaGetDeviceProperties(index)
    if status != runtime.cudaError_t.cudaSuccess:
        raise TargetError(f"the GPU does not say what it is ({runtime.cudaError_t(status).name})")
    capability = f"{properties.major}.{properties.minor}"
    return Device(properties.name.decode(), capability, properties.totalGlobalMem)
