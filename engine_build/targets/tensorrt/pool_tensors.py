"""The KV pools among a plan's tensors: each is an input, and an output that a runtime binds to the same memory.

```
key_cache_{i}, value_cache_{i}             [num_blocks, kv_heads, tokens_per_block, head_size] of the network's dtype
                                           [num_blocks, kv_heads, chunk] of 8 bits: a block of one head and its scales
key_cache_{i}_out, value_cache_{i}_out     as the input
```
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from engine_build.kernels.shape import AttentionShape
from engine_build.network.paged_attention import DOMAIN, OPERATOR

_EIGHT_BIT = {"float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN, "int8": onnx.TensorProto.INT8}


def cache_output(name: str) -> str:
    """The output that holds the pool `name` after the step."""
    return f"{name}_out"


def cache_inputs(model: onnx.ModelProto) -> list[str]:
    """Names of the pools that `PagedAttention` nodes of a network take."""
    attentions = (node for node in model.graph.node if node.domain == DOMAIN and node.op_type == OPERATOR)
    return [name for node in attentions for name in node.input[3:5]]


def add_cache_outputs(graph: onnx.GraphProto, caches: Iterable[str]) -> None:
    """Declare the outputs, each of its input's type and shape."""
    wanted = set(caches)
    for value in list(graph.input):
        if value.name in wanted:
            output = graph.output.add()
            output.CopyFrom(value)
            output.name = cache_output(value.name)


def set_cache_type(graph: onnx.GraphProto, caches: Iterable[str], shape: AttentionShape) -> None:
    """Give the pools the type and shape in which `shape` keeps keys and values."""
    wanted = set(caches)
    for value in graph.input:
        if value.name in wanted:
            tensor = value.type.tensor_type
            tensor.shape.dim[2].dim_value = shape.tokens_per_block
            if shape.is_eight_bit:
                tensor.elem_type = _EIGHT_BIT[shape.kv_cache_dtype]
                tensor.shape.dim[2].dim_value = shape.elements_per_chunk
                del tensor.shape.dim[3]
