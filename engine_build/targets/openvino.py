"""Target `openvino`: `PagedAttention` becomes OpenVINO's own paged attention.

The plan on disk stays the ONNX file, since a compiled blob with paged attention cannot be loaded back; an engine
compiles it in about a second when it starts. The build compiles it once as well, to prove that it can be.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.manifest import BuildConfig
from engine_build.network.graph import MODEL_FILE
from engine_build.network.paged_attention import DOMAIN, OPERATOR
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

if TYPE_CHECKING:
    import openvino

TOKENS_PER_BLOCK = 32
"""Fixed by OpenVINO's CPU plugin."""

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
"""Dtype -> OpenVINO's name for it."""


class OpenVinoTarget:
    """See `Target`."""

    name = "openvino"
    dtypes: tuple[str, ...] = tuple(PRECISIONS)
    weight_dtypes: tuple[str, ...] = ("as_stored", "int8")
    quantized_as = "groups"
    default_tokens_per_block = TOKENS_PER_BLOCK
    times_kernels = False

    def activation_dtype(self, dtype: str) -> str:  # noqa: ARG002, OpenVINO narrows a float32 graph by itself
        return "float32"

    def tensorrt_config(self, options: TensorRtOptions | None, dtype: str) -> None:  # noqa: ARG002
        refuse_tensorrt_options(self.name, options)

    def check(self, build_config: BuildConfig, model: ModelConfig) -> None:  # noqa: ARG002
        if build_config.dtype not in PRECISIONS:
            raise TargetError(
                f"dtype {build_config.dtype!r} is not supported; target openvino computes in {', '.join(PRECISIONS)}"
            )
        if build_config.tokens_per_block != TOKENS_PER_BLOCK:
            raise TargetError(
                f"tokens_per_block {build_config.tokens_per_block} is not supported; "
                f"target openvino has blocks of {TOKENS_PER_BLOCK}"
            )
        check_single_device(self.name, build_config)

    def kv_cache_types(self, build_config: BuildConfig) -> tuple[KvCacheType, ...]:
        scale_and_zero_point = 8
        eight_bit = KvCacheType("uint8", 1, scale_and_zero_point)
        if build_config.dtype == "float32":
            return KvCacheType("float32", 4, 0), KvCacheType("float16", 2, 0), eight_bit
        return KvCacheType("bfloat16", 2, 0), eight_bit

    def versions(self) -> dict[str, str]:
        _import_openvino()
        return {"openvino": metadata.version("openvino")}

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
        rank: int,  # noqa: ARG002
        build_config: BuildConfig,
        model: ModelConfig,  # noqa: ARG002
        options: CompileOptions,  # noqa: ARG002
        report: ProgressCallback,
    ) -> None:
        report("compiling the plan", 0, 1)
        self._prove(directory / MODEL_FILE, build_config)
        report("compiling the plan", 1, 1)

    def _prove(self, model_path: Path, build_config: BuildConfig) -> None:
        ov = _import_openvino()
        core = ov.Core()
        try:
            core.compile_model(
                read_network(core, model_path), "CPU", {"INFERENCE_PRECISION_HINT": PRECISIONS[build_config.dtype]}
            )
        except RuntimeError as error:  # what every failure inside OpenVINO is raised as
            raise TargetError(f"OpenVINO cannot compile the network: {error}") from error


def read_network(core: openvino.Core, model_path: Path) -> openvino.Model:
    """Read the ONNX network, its attention turned into OpenVINO's.

    The cache inputs are of dynamic type and shape: on compilation the plugin gives them those that its
    KV_CACHE_PRECISION asks for.

    Raises:
        RuntimeError: OpenVINO cannot read the file.
    """
    ov = _import_openvino()
    from openvino.frontend.onnx import ConversionExtension

    core.add_extension(ConversionExtension(OPERATOR, DOMAIN, _paged_attention))
    model = core.read_model(model_path)
    for parameter in model.get_parameters():
        if "_cache_" in parameter.get_friendly_name():
            parameter.set_element_type(ov.Type.dynamic)
            parameter.set_partial_shape(ov.PartialShape([-1, -1, -1, -1]))
    model.validate_nodes_and_infer_types()
    return model


def _paged_attention(context: Any) -> list[Any]:
    """Inputs of our operator -> the 28 of OpenVINO's, in its order; those for features not in use are empty."""
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension as PagedAttentionExtension

    def constant(value: object, dtype: type[np.generic]) -> Any:
        return opset13.constant(np.array(value, dtype)).output(0)

    def empty(dtype: type[np.generic]) -> Any:
        return constant([], dtype)

    if context.get_attribute("soft_cap", 0.0):
        raise TargetError("soft_cap is not supported: OpenVINO's paged attention does not bound scores")
    zero = constant(0, np.int32)
    no_rotation = constant(np.zeros((0, 0, 0, 0)), np.float32)
    arguments = [context.get_input(index) for index in range(9)]
    arguments += [
        constant(context.get_attribute("scale"), np.float32),
        constant(context.get_attribute("sliding_window"), np.int32),
        empty(np.float32),  # alibi slopes
        context.get_input(9),  # longest context
        *(empty(np.int32) for _ in range(3)),  # score aggregation, rotated blocks, rotation deltas
        *(empty(np.float32) for _ in range(2)),  # rotation table, sparse attention threshold
        zero,
        zero,
        no_rotation,
        zero,
        *(empty(np.int32) for _ in range(4)),
        empty(np.uint8),
        empty(np.int32),
    ]
    node = PagedAttentionExtension(arguments)
    info = node.get_rt_info()
    for kind in ("k", "v"):
        info[f"num_{kind}_heads"] = context.get_attribute("num_kv_heads")
        info[f"{kind}_head_size"] = context.get_attribute("head_size")
    return [node.output(0)]


def _import_openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise TargetError("target openvino needs the package openvino: pip install openvino") from error
    return openvino
