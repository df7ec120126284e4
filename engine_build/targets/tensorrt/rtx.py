"""Target `tensorrt-rtx`: TensorRT for RTX, which builds on any machine for any of its device generations.

It takes no operators of ours, so attention is lowered to its own layers (`native_attention.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.manifest import BuildConfig, TensorRtConfig
from engine_build.network.graph import MODEL_FILE
from engine_build.targets.interface import (
    BuildCost,
    CompileOptions,
    ProgressCallback,
    TargetError,
    TensorRtOptions,
)
from engine_build.targets.tensorrt.base import (
    TensorRtTargetBase,
    check_compute_capability,
    check_memory,
    layers_of_rank,
    rank_file,
    write_plan,
)
from engine_build.targets.tensorrt.collective_layers import COLLECTIVE_OPERATORS
from engine_build.targets.tensorrt.device import find_device
from engine_build.targets.tensorrt.native_attention import lower_paged_attention
from engine_build.targets.tensorrt.operators import OPERATORS
from engine_build.targets.tensorrt.package import TENSORRT_RTX
from engine_build.targets.tensorrt.plan import PlanRequest, build_plan
from engine_build.targets.tensorrt.profiles import profile_ranges

COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
DEFAULT_COMPUTE_CAPABILITIES = ("8.9", "12.0")
"""The last two generations of GeForce and RTX cards."""

_MEMORY_PER_WEIGHT_BYTE = 3.3
_MEMORY_BESIDE_WEIGHTS = 1_200_000_000
_SECONDS_PER_LAYER = 1.0
_SECONDS_PER_WEIGHT_GB = 12.0
"""Measured with 135 million parameters in 30 layers (2.1 GB, 40 s) and 1.1 billion in 16 (7.9 GB, 46 s), for two device
generations, on two busy cores: an idle machine takes a good part less."""


class TensorRtRtxTarget(TensorRtTargetBase):
    """See `Target`."""

    package = TENSORRT_RTX
    times_kernels = False

    def tensorrt_config(self, options: TensorRtOptions | None, dtype: str) -> TensorRtConfig:
        options = options or TensorRtOptions()
        if options.kv_cache_dtype not in (None, dtype):
            raise TargetError(
                f"kv_cache_dtype {options.kv_cache_dtype!r} is not supported; target {self.name} keeps keys and values "
                f"in the plan's dtype, {dtype}"
            )
        capabilities = options.compute_capabilities or DEFAULT_COMPUTE_CAPABILITIES
        for capability in capabilities:
            check_compute_capability(capability, self.name, COMPUTE_CAPABILITIES)
        return TensorRtConfig(
            tuple(sorted(set(capabilities), key=COMPUTE_CAPABILITIES.index)),
            dtype,
            options.strip_plan,
            options.weight_streaming,
            options.profiling_verbosity,
        )

    def check(self, build_config: BuildConfig, model: ModelConfig) -> None:
        self._check_common(build_config)
        profile_ranges(build_config, model, is_attention_native=True)
        assert build_config.tensorrt is not None  # `tensorrt_config` has made one
        if build_config.tensorrt.strip_plan:
            try:
                find_device()
            except TargetError as error:
                raise TargetError(
                    f"strip_plan with target {self.name} needs a GPU on the machine that builds: {error}"
                ) from error

    def build_cost(self, weight_bytes: int, build_config: BuildConfig, model: ModelConfig) -> BuildCost:
        share = weight_bytes / (build_config.tp_size * build_config.pp_size)
        return BuildCost(
            int(_MEMORY_BESIDE_WEIGHTS + _MEMORY_PER_WEIGHT_BYTE * share),
            _SECONDS_PER_LAYER * layers_of_rank(model, build_config) + _SECONDS_PER_WEIGHT_GB * share / 1e9,
        )

    def compile(
        self,
        directory: Path,
        rank: int,
        build_config: BuildConfig,
        model: ModelConfig,
        options: CompileOptions,  # noqa: ARG002
        report: ProgressCallback,
    ) -> None:
        trt = self.package.load()
        weights = sum(path.stat().st_size for path in directory.iterdir())
        check_memory(self.build_cost(weights * build_config.tp_size * build_config.pp_size, build_config, model))
        network = onnx.load(directory / MODEL_FILE, load_external_data=False)
        lowered = lower_paged_attention(network, build_config.tokens_per_block)
        onnx.save(lowered, directory / MODEL_FILE)
        request = PlanRequest(
            model=lowered,
            directory=directory,
            operators=OPERATORS | COLLECTIVE_OPERATORS,
            ranges=profile_ranges(build_config, model, is_attention_native=True),
            build_config=build_config,
            stage="compiling",
        )
        write_plan(directory / rank_file(rank), build_plan(trt, request, _configure(build_config), report))


def _configure(build_config: BuildConfig) -> Any:
    settings = build_config.tensorrt
    assert settings is not None  # `tensorrt_config` has made one

    def configure(trt: Any, config: Any) -> None:
        config.num_compute_capabilities = len(settings.compute_capabilities)
        for index, capability in enumerate(settings.compute_capabilities):
            name = "SM" + capability.replace(".", "")
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name), index):
                raise TargetError(
                    f"{trt.__name__} {trt.__version__} does not build for compute capability {capability}"
                )

    return configure
