"""Adds a layer's attention to a network as our plugins; for the package that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from engine_build.kernels.shape import AttentionShape
from engine_build.manifest import BuildConfig
from engine_build.network.paged_attention import DOMAIN, OPERATOR
from engine_build.targets.tensorrt.emitter import NetworkEmitter, Operator, Tensor, attribute
from engine_build.targets.tensorrt.plugin_kernels import LayerKernels, splits_for
from engine_build.targets.tensorrt.plugins import NAMESPACE, encode
from engine_build.targets.tensorrt.pool_tensors import cache_output


def plugin_operators(trtp: Any, build_config: BuildConfig) -> dict[tuple[str, str], Operator]:
    """`PagedAttention` through the plugins registered in `trtp`."""

    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        return [_emit(trtp, build_config, emitter, node)]

    return {(DOMAIN, OPERATOR): emit}


def layer_kernels(node: onnx.NodeProto, build_config: BuildConfig) -> LayerKernels:
    """What the kernels of a `PagedAttention` node are compiled for."""
    assert build_config.tensorrt is not None  # `tensorrt_config` has made one
    shape = AttentionShape(
        num_heads=attribute(node, "num_heads"),
        num_kv_heads=attribute(node, "num_kv_heads"),
        head_size=attribute(node, "head_size"),
        tokens_per_block=build_config.tokens_per_block,
        dtype=build_config.dtype,
        kv_cache_dtype=build_config.tensorrt.kv_cache_dtype,
        scale=attribute(node, "scale"),
        sliding_window=attribute(node, "sliding_window"),
        soft_cap=attribute(node, "soft_cap", 0.0),
    )
    splits = splits_for(shape, build_config.max_batch_size, build_config.max_seq_len)
    return LayerKernels(shape, splits, build_config.tensorrt.compute_capabilities[0])


def _emit(trtp: Any, build_config: BuildConfig, emitter: NetworkEmitter, node: onnx.NodeProto) -> Tensor:
    query, key, value, *caches = (emitter.tensor(name) for name in node.input[:5])
    step = [emitter.tensor(name) for name in node.input[5:9]]
    kernels = encode(layer_kernels(node, build_config))
    plugins = getattr(trtp.op, NAMESPACE)

    def add(name: str, inputs: Sequence[Tensor]) -> Any:
        layer = emitter.network.add_plugin(getattr(plugins, name)(*inputs, kernels=kernels), aot=True)
        return emitter.named(layer, f"{node.name}.{name}")

    written = add("write_kv", [key, value, *step, *caches])
    pools = [written.get_output(index) for index in range(2)]
    for pool, name in zip(pools, node.input[3:5], strict=True):
        emitter.define(cache_output(name), pool)
    of_context = add("attend_context", [query, *step, *pools]).get_output(0)
    generation = add("attend_generation", [query, *step, *pools, of_context])
    workspace = [generation.get_output(index) for index in range(2)]
    return add("reduce_splits", [*workspace, step[1], of_context]).get_output(0)
