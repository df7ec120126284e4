"""Target `reference`: the graph is interpreted operator by operator, so there is nothing to compile."""

from __future__ import annotations

from pathlib import Path

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.kernels.shape import EIGHT_BIT_MAXIMA
from engine_build.manifest import BuildConfig
from engine_build.targets.checks import (
    NETWORK_FILES,
    check_single_device,
    refuse_tensorrt_options,
)
from engine_build.targets.interface import (
    BuildCost,
    CompileOptions,
    KvCacheType,
    ProgressCallback,
    TargetError,
    TensorRtOptions,
)

_BYTES_OF_A_SCALE = 4


class ReferenceTarget:
    """See `Target`."""

    name = "reference"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    weight_dtypes: tuple[str, ...] = ("as_stored", "int8")
    quantized_as = "groups"
    default_tokens_per_block = 32
    times_kernels = False

    def activation_dtype(self, dtype: str) -> str:  # noqa: ARG002, the oracle narrows nothing between operators
        return "float32"

    def tensorrt_config(self, options: TensorRtOptions | None, dtype: str) -> None:  # noqa: ARG002
        refuse_tensorrt_options(self.name, options)

    def check(self, build_config: BuildConfig, model: ModelConfig) -> None:  # noqa: ARG002
        if build_config.dtype not in self.dtypes:
            raise TargetError(
                f"dtype {build_config.dtype!r} is unknown; target reference computes in {', '.join(self.dtypes)}"
            )
        check_single_device(self.name, build_config)

    def kv_cache_types(self, build_config: BuildConfig) -> tuple[KvCacheType, ...]:
        default = build_config.dtype
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        names = (default, *(name for name in sizes if name != default))
        as_they_are = tuple(KvCacheType(name, sizes[name], 0) for name in names)
        return (*as_they_are, *(KvCacheType(name, 1, _BYTES_OF_A_SCALE) for name in EIGHT_BIT_MAXIMA))

    def versions(self) -> dict[str, str]:
        return {}

    def plan_files(self, build_config: BuildConfig) -> tuple[str, ...]:  # noqa: ARG002
        return NETWORK_FILES

    def build_cost(
        self,
        weight_bytes: int,  # noqa: ARG002
        build_config: BuildConfig,  # noqa: ARG002
        model: ModelConfig,  # noqa: ARG002
    ) -> BuildCost | None:
        return None

    def compile(
        self,
        directory: Path,
        rank: int,
        build_config: BuildConfig,
        model: ModelConfig,
        options: CompileOptions,
        report: ProgressCallback,
    ) -> None:
        """Nothing is left to do: the network's writer has checked the graph."""
