"""Target `tensorrt`: TensorRT for data-centre GPUs, which builds on a machine that has the GPU.

Attention becomes plugins of ours (`plugins.py`), whose kernels are compiled into the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.kernels.shape import AttentionShape, KernelError
from engine_build.manifest import BuildConfig, TensorRtConfig
from engine_build.network.graph import MODEL_FILE
from engine_build.targets.interface import BuildCost, CompileOptions, ProgressCallback, TargetError, TensorRtOptions
from engine_build.targets.tensorrt.base import TensorRtTargetBase, check_compute_capability, rank_file, write_plan
from engine_build.targets.tensorrt.collective_layers import COLLECTIVE_OPERATORS
from engine_build.targets.tensorrt.device import find_device
from engine_build.targets.tensorrt.operators import OPERATORS
from engine_build.targets.tensorrt.package import TENSORRT
from engine_build.targets.tensorrt.plan import PlanRequest, build_plan
from engine_build.targets.tensorrt.plugin_attention import plugin_operators
from engine_build.targets.tensorrt.plugins import load_plugins
from engine_build.targets.tensorrt.pool_tensors import add_cache_outputs, cache_inputs, set_cache_type
from engine_build.targets.tensorrt.profiles import profile_ranges
from engine_build.targets.tensorrt.timing_cache import read_timing_cache, write_timing_cache

COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


class TensorRtTarget(TensorRtTargetBase):
    """See `Target`."""

    package = TENSORRT
    times_kernels = True

    def tensorrt_config(self, options: TensorRtOptions | None, dtype: str) -> TensorRtConfig:
        options = options or TensorRtOptions()
        capabilities = options.compute_capabilities or (find_device().compute_capability,)
        if len(capabilities) > 1:
            raise TargetError(f"target {self.name} builds for one compute capability, that of the GPU it builds on")
        check_compute_capability(capabilities[0], self.name, COMPUTE_CAPABILITIES)
        return TensorRtConfig(
            capabilities,
            options.kv_cache_dtype or dtype,
            options.strip_plan,
            options.weight_streaming,
            options.profiling_verbosity,
        )

    def check(self, build_config: BuildConfig, model: ModelConfig) -> None:
        self._check_common(build_config)
        profile_ranges(build_config, model, is_attention_native=False)
        try:
            _attention_shape(build_config, model).check()
        except KernelError as error:
            raise TargetError(str(error)) from error

    def build_cost(
        self,
        weight_bytes: int,  # noqa: ARG002
        build_config: BuildConfig,  # noqa: ARG002
        model: ModelConfig,  # noqa: ARG002
    ) -> BuildCost | None:
        """Not known: no build has been measured."""
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
        assert build_config.tensorrt is not None  # `tensorrt_config` has made one
        wanted, device = build_config.tensorrt.compute_capabilities[0], find_device()
        if device.compute_capability != wanted:
            raise TargetError(
                f"compute_capability {wanted} cannot be built for on {device.name}, which has "
                f"{device.compute_capability}: build on the GPU that will run the plan"
            )
        trt = self.package.load()
        network = onnx.load(directory / MODEL_FILE, load_external_data=False)
        caches = cache_inputs(network)
        set_cache_type(network.graph, caches, _attention_shape(build_config, model))
        add_cache_outputs(network.graph, caches)
        onnx.save(network, directory / MODEL_FILE)
        request = PlanRequest(
            model=network,
            directory=directory,
            operators=OPERATORS | COLLECTIVE_OPERATORS | plugin_operators(load_plugins(trt.__name__), build_config),
            ranges=profile_ranges(build_config, model, is_attention_native=False),
            build_config=build_config,
            stage="compiling",
        )
        configs: list[Any] = []
        plan = build_plan(trt, request, configure(options, configs.append), report)
        write_plan(directory / rank_file(rank), plan)
        if options.output_timing_cache is not None:
            write_timing_cache(configs[0], options.output_timing_cache)


def _attention_shape(build_config: BuildConfig, model: ModelConfig) -> AttentionShape:
    """Of the whole model's layers; the shares of several devices are kept alike."""
    assert build_config.tensorrt is not None  # `tensorrt_config` has made one
    return AttentionShape(
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_size=model.head_size,
        tokens_per_block=build_config.tokens_per_block,
        dtype=build_config.dtype,
        kv_cache_dtype=build_config.tensorrt.kv_cache_dtype,
        scale=model.head_size**-0.5,
        sliding_window=model.sliding_window or 0,
    )


def configure(options: CompileOptions, keep: Callable[[Any], None]) -> Callable[[Any, Any], None]:
    """What only this package is configured with: pools that are written in place, and timings."""

    def apply(trt: Any, config: Any) -> None:
        if not config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True):
            raise TargetError(f"tensorrt {trt.__version__} has no plugins that write in place: 11 or newer has")
        read_timing_cache(config, options.input_timing_cache)
        keep(config)

    return apply
