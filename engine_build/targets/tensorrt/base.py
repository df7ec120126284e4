"""What the two targets of TensorRT share."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.kernels.shape import EIGHT_BIT_MAXIMA
from engine_build.manifest import BuildConfig
from engine_build.network.options import DTYPES
from engine_build.targets.interface import BuildCost, KvCacheType, TargetError
from engine_build.targets.tensorrt.package import TensorRtPackage

_FLOATS_OF_8_BITS = ("fp8", "float8_e4m3fn")
_BYTES_OF_A_SCALE = 4
"""Of each 8-bit key or value of one head."""
PROFILING_VERBOSITIES = ("none", "layer_names_only", "detailed")


def rank_file(rank: int) -> str:
    """The plan of a rank, named as TensorRT-LLM names it."""
    return f"rank{rank}.engine"


def check_compute_capability(capability: str, target: str, supported: tuple[str, ...]) -> None:
    """Raises `TargetError` for a device generation that the target has no plans for."""
    if capability not in supported:
        hint = "; for 9.0 and 10.0 there is target tensorrt" if target == "tensorrt-rtx" else ""
        raise TargetError(
            f"compute_capability {capability!r} is not supported; target {target} builds for "
            f"{', '.join(supported)}{hint}"
        )


class TensorRtTargetBase:
    """The part of `Target` that does not depend on which package builds."""

    package: TensorRtPackage
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    weight_dtypes: tuple[str, ...] = ("as_stored", "int8", "int4", "fp8")
    quantized_as = "quantize_linear"
    default_tokens_per_block = 32

    @property
    def name(self) -> str:
        return self.package.target

    def activation_dtype(self, dtype: str) -> str:
        return dtype

    def kv_cache_types(self, build_config: BuildConfig) -> tuple[KvCacheType, ...]:
        settings = build_config.tensorrt
        assert settings is not None  # `tensorrt_config` has made one
        if settings.kv_cache_dtype in EIGHT_BIT_MAXIMA:
            return (KvCacheType(settings.kv_cache_dtype, 1, _BYTES_OF_A_SCALE),)
        return (KvCacheType(build_config.dtype, DTYPES[build_config.dtype].itemsize, 0),)

    def versions(self) -> dict[str, str]:
        module = self.package.load()
        return {self.package.module: str(module.__version__), "ml_dtypes": metadata.version("ml_dtypes")}

    def plan_files(self, build_config: BuildConfig) -> tuple[str, ...]:
        return tuple(rank_file(rank) for rank in range(build_config.tp_size * build_config.pp_size))

    def _check_common(self, build_config: BuildConfig) -> None:
        if build_config.dtype not in self.dtypes:
            raise TargetError(
                f"dtype {build_config.dtype!r} is not supported; target {self.name} computes in "
                f"{', '.join(self.dtypes)}"
            )
        settings = build_config.tensorrt
        assert settings is not None  # `tensorrt_config` has made one
        if settings.profiling_verbosity not in PROFILING_VERBOSITIES:
            raise TargetError(
                f"profiling_verbosity {settings.profiling_verbosity!r} is unknown; expected one of "
                f"{', '.join(PROFILING_VERBOSITIES)}"
            )
        eight_bit_floats = {"weight_dtype": build_config.weight_dtype, "kv_cache_dtype": settings.kv_cache_dtype}
        for name in (name for name, dtype in eight_bit_floats.items() if dtype in _FLOATS_OF_8_BITS):
            too_old = [one for one in settings.compute_capabilities if _generation(one) < (8, 9)]
            if too_old:
                raise TargetError(
                    f"{name} {eight_bit_floats[name]!r} needs compute capability 8.9 or newer, not "
                    f"{', '.join(too_old)}: int8 runs there"
                )
        if build_config.dtype == "bfloat16":
            too_old = [one for one in settings.compute_capabilities if _generation(one) < (8, 0)]
            if too_old:
                raise TargetError(
                    f"dtype 'bfloat16' needs compute capability 8.0 or newer, not {', '.join(too_old)}: "
                    "float16 runs there"
                )


def check_memory(cost: BuildCost) -> None:
    """Raises `TargetError` when a build would take more memory than this machine has to give."""
    available = _available_memory()
    if available is not None and cost.memory > available:
        raise TargetError(
            f"building takes about {cost.memory / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available: "
            "build on a larger machine, or in parts (--tp_size, --pp_size)"
        )


def write_plan(path: Path, plan: memoryview) -> None:
    """Write a serialized plan where the engine writer will sync it."""
    with path.open("wb") as file:
        file.write(plan)


def layers_of_rank(model: ModelConfig, build_config: BuildConfig) -> int:
    """Of the rank that has most."""
    return -(-model.num_hidden_layers // build_config.pp_size)


def _generation(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def _available_memory() -> int | None:
    """Bytes, where the system tells."""
    if not os.path.exists("/proc/meminfo"):
        return None
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None
