"""What each ONNX operator of our networks becomes in a TensorRT network. Semantics: ONNX operator set 23.

Operators are strict about what they accept: only what `engine_build.network` and the lowerings write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from engine_build.targets.tensorrt.emitter import NetworkEmitter, Operator, Tensor, attribute


def _elementwise(operation: str) -> Operator:
    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        left, right = _same_rank(emitter, [emitter.tensor(name) for name in node.input], node.name)
        return [_elementwise_layer(emitter, left, right, operation, node.name)]

    return emit


def _elementwise_layer(emitter: NetworkEmitter, left: Tensor, right: Tensor, operation: str, name: str) -> Tensor:
    kind = getattr(emitter.trt.ElementWiseOperation, operation)
    return emitter.named(emitter.network.add_elementwise(left, right, kind), name).get_output(0)


def _same_rank(emitter: NetworkEmitter, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """With leading dimensions of 1, as ONNX broadcasts."""
    rank = max(len(tensor.shape) for tensor in tensors)
    return [
        tensor if len(tensor.shape) == rank else _with_leading_dimensions(emitter, tensor, rank, f"{name}.{index}")
        for index, tensor in enumerate(tensors)
    ]


def _with_leading_dimensions(emitter: NetworkEmitter, tensor: Tensor, rank: int, name: str) -> Tensor:
    missing = rank - len(tensor.shape)
    layer = emitter.named(emitter.network.add_shuffle(tensor), f"{name}.broadcast")
    if len(tensor.shape) == 0:
        layer.reshape_dims = (1,) * rank
    else:
        layer.reshape_dims = (*(1,) * missing, *([-1] if len(tensor.shape) == 1 else tensor.shape))
    return layer.get_output(0)


def _less_or_equal(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    return _negated_comparison(emitter, node, "GREATER")


def _greater_or_equal(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    return _negated_comparison(emitter, node, "LESS")


def _negated_comparison(emitter: NetworkEmitter, node: onnx.NodeProto, operation: str) -> Sequence[Tensor]:
    """Of integers, so that what is not greater is less or equal."""
    left, right = _same_rank(emitter, [emitter.tensor(name) for name in node.input], node.name)
    compared = _elementwise_layer(emitter, left, right, operation, f"{node.name}.negated")
    return [_unary_layer(emitter, compared, "NOT", node.name)]


def _unary(operation: str) -> Operator:
    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        return [_unary_layer(emitter, emitter.tensor(node.input[0]), operation, node.name)]

    return emit


def _unary_layer(emitter: NetworkEmitter, tensor: Tensor, operation: str, name: str) -> Tensor:
    kind = getattr(emitter.trt.UnaryOperation, operation)
    return emitter.named(emitter.network.add_unary(tensor, kind), name).get_output(0)


def _activation(kind: str) -> Operator:
    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        activation = getattr(emitter.trt.ActivationType, kind)
        layer = emitter.network.add_activation(emitter.tensor(node.input[0]), activation)
        return [emitter.named(layer, node.name).get_output(0)]

    return emit


def _softmax(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    tensor = emitter.tensor(node.input[0])
    layer = emitter.named(emitter.network.add_softmax(tensor), node.name)
    layer.axes = 1 << attribute(node, "axis", -1) % len(tensor.shape)
    return [layer.get_output(0)]


def _where(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """The condition is a mask `[T, C]` over the last two axes."""
    condition, *values = (emitter.tensor(name) for name in node.input)
    values = _same_rank(emitter, values, node.name)
    condition = _with_leading_dimensions_of_mask(emitter, condition, f"{node.name}.condition")
    return [emitter.named(emitter.network.add_select(condition, *values), node.name).get_output(0)]


def _cast(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    return [_cast_to(emitter, emitter.tensor(node.input[0]), emitter.data_type(attribute(node, "to")), node.name)]


def _cast_to(emitter: NetworkEmitter, tensor: Tensor, data_type: Any, name: str) -> Tensor:
    if tensor.dtype == data_type:
        return tensor
    return emitter.named(emitter.network.add_cast(tensor, data_type), name).get_output(0)


def _concat(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    tensors = [emitter.tensor(name) for name in node.input]
    layer = emitter.named(emitter.network.add_concatenation(tensors), node.name)
    layer.axis = attribute(node, "axis") % len(tensors[0].shape)
    return [layer.get_output(0)]


def _gather(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    data, indices = (emitter.tensor(name) for name in node.input)
    layer = emitter.network.add_gather(data, indices, attribute(node, "axis", 0))
    return [emitter.named(layer, node.name).get_output(0)]


def _scatter_nd(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    tensors = [emitter.tensor(name) for name in node.input]
    layer = emitter.network.add_scatter(*tensors, emitter.trt.ScatterMode.ND)
    return [emitter.named(layer, node.name).get_output(0)]


def _matmul(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """A transposition of the right side is part of the product, so that weights stay `[out, in]`."""
    plain, transposed = emitter.trt.MatrixOperation.NONE, emitter.trt.MatrixOperation.TRANSPOSE
    left, right = node.input
    source = emitter.producer(right)
    operation = plain
    if source is not None and source.op_type == "Transpose" and list(attribute(source, "perm")) == [1, 0]:
        right, operation = source.input[0], transposed
    layer = emitter.network.add_matrix_multiply(emitter.tensor(left), plain, emitter.tensor(right), operation)
    return [emitter.named(layer, node.name).get_output(0)]


def _identity(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    layer = emitter.network.add_identity(emitter.tensor(node.input[0]))
    return [emitter.named(layer, node.name).get_output(0)]


def _transpose(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    layer = emitter.named(emitter.network.add_shuffle(emitter.tensor(node.input[0])), node.name)
    layer.first_transpose = tuple(attribute(node, "perm"))
    return [layer.get_output(0)]


def _reshape(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    layer = emitter.named(emitter.network.add_shuffle(emitter.tensor(node.input[0])), node.name)
    layer.reshape_dims = tuple(emitter.constants.integers(node.input[1]))
    return [layer.get_output(0)]


def _squeeze(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """Of one element to a scalar."""
    layer = emitter.named(emitter.network.add_shuffle(emitter.tensor(node.input[0])), node.name)
    layer.reshape_dims = ()
    return [layer.get_output(0)]


def _shape(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """Entries `start` to `end` of the shape, int64 as in ONNX."""
    tensor = emitter.tensor(node.input[0])
    whole = emitter.named(emitter.network.add_shape(tensor), f"{node.name}.whole").get_output(0)
    start, end = attribute(node, "start", 0), attribute(node, "end", len(tensor.shape))
    part = emitter.network.add_slice(whole, (start,), (end - start,), (1,))
    return [emitter.named(part, node.name).get_output(0)]


def _range(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """`0, 1, ..., limit - 1` as int64."""
    limit = emitter.named(emitter.network.add_shuffle(emitter.tensor(node.input[1])), f"{node.name}.limit")
    limit.reshape_dims = (1,)
    trt = emitter.trt
    layer = emitter.named(emitter.network.add_fill((1,), trt.FillOperation.LINSPACE, trt.int64), node.name)
    layer.set_input(0, limit.get_output(0))
    layer.set_input(1, emitter.tensor(node.input[0]))
    step = emitter.named(emitter.network.add_shuffle(emitter.tensor(node.input[2])), f"{node.name}.step")
    step.reshape_dims = (1,)
    layer.set_input(2, step.get_output(0))
    return [layer.get_output(0)]


def _slice(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """Along one axis, by constants. Where the axis is dynamic, the slice may only leave elements out at its ends."""
    tensor = emitter.tensor(node.input[0])
    (start,), (end,), (axis,) = (emitter.constants.integers(name) for name in node.input[1:4])
    return [_slice_axis(emitter, tensor, axis % len(tensor.shape), start, end, node.name)]


def _slice_axis(emitter: NetworkEmitter, tensor: Tensor, axis: int, start: int, end: int, name: str) -> Tensor:
    network, size = emitter.network, tensor.shape[axis]
    rank = len(tensor.shape)
    if size >= 0:
        start, end = (min(at + size if at < 0 else at, size) for at in (start, end))
    starts = [0] * rank
    starts[axis] = start
    if -1 not in tensor.shape:
        sizes = list(tensor.shape)
        sizes[axis] = end - start
        layer = network.add_slice(tensor, tuple(starts), tuple(sizes), (1,) * rank)
        return emitter.named(layer, name).get_output(0)
    # sizes = shape with the axis' own size replaced by what is left of it
    left_out = [0] * rank
    if size >= 0:
        left_out[axis] = size - (end - start)
    else:
        left_out[axis] = start - end if end < 0 else start
    shape = emitter.named(network.add_shape(tensor), f"{name}.shape").get_output(0)
    difference = _integer_constant(emitter, left_out, f"{name}.left_out")
    sizes_tensor = _elementwise_layer(emitter, shape, difference, "SUB", f"{name}.sizes")
    layer = emitter.named(network.add_slice(tensor, tuple(starts), (0,) * rank, (1,) * rank), name)
    layer.set_input(2, sizes_tensor)
    return layer.get_output(0)


def _integer_constant(emitter: NetworkEmitter, values: Sequence[int], name: str) -> Tensor:
    return emitter.small_constant(name, onnx.TensorProto.INT64, values, (len(values),))


def _split(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    tensor = emitter.tensor(node.input[0])
    axis = attribute(node, "axis", 0) % len(tensor.shape)
    outputs, start = [], 0
    for name, length in zip(node.output, emitter.constants.integers(node.input[1]), strict=True):
        outputs.append(_slice_axis(emitter, tensor, axis, start, start + length, name))
        start += length
    return outputs


def _reduce(operation: str) -> Operator:
    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        tensor = emitter.tensor(node.input[0])
        axes = sum(1 << axis % len(tensor.shape) for axis in emitter.constants.integers(node.input[1]))
        kind = getattr(emitter.trt.ReduceOperation, operation)
        layer = emitter.network.add_reduce(tensor, kind, axes, bool(attribute(node, "keepdims", 1)))
        return [emitter.named(layer, node.name).get_output(0)]

    return emit


def _rms_normalization(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """`x / sqrt(mean(x ** 2) + epsilon) * scale` over the last axis, the statistics in float32."""
    trt, network, name = emitter.trt, emitter.network, node.name
    tensor, scale = (emitter.tensor(value) for value in node.input)
    wide = _cast_to(emitter, tensor, trt.float32, f"{name}.wide")
    square = _elementwise_layer(emitter, wide, wide, "PROD", f"{name}.square")
    last_axis = 1 << len(tensor.shape) - 1
    mean = emitter.named(network.add_reduce(square, trt.ReduceOperation.AVG, last_axis, True), f"{name}.mean")
    epsilon = emitter.small_constant(
        f"{name}.epsilon", onnx.TensorProto.FLOAT, [attribute(node, "epsilon")], (1,) * len(tensor.shape)
    )
    shifted = _elementwise_layer(emitter, mean.get_output(0), epsilon, "SUM", f"{name}.shifted")
    root = _unary_layer(emitter, shifted, "SQRT", f"{name}.root")
    normalized = _elementwise_layer(emitter, wide, root, "DIV", f"{name}.normalized")
    narrow = _cast_to(emitter, normalized, tensor.dtype, f"{name}.narrow")
    narrow, scale = _same_rank(emitter, [narrow, scale], name)
    return [_elementwise_layer(emitter, narrow, scale, "PROD", name)]


def _attention(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """`softmax(scale * query @ key.T, where mask) @ value` by heads; the layer has no scale of its own."""
    trt = emitter.trt
    query, key, value, mask = (emitter.tensor(name) for name in node.input)
    scale = emitter.small_constant(
        f"{node.name}.scale", onnx.TensorProto.FLOAT, [attribute(node, "scale")], (1,) * len(query.shape)
    )
    scale = _cast_to(emitter, scale, query.dtype, f"{node.name}.scale_narrow")
    scaled = _elementwise_layer(emitter, query, scale, "PROD", f"{node.name}.scaled")
    layer = emitter.network.add_attention_v2(
        scaled, key, value, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
    )
    layer = emitter.named(layer, node.name)
    layer.mask = _with_leading_dimensions_of_mask(emitter, mask, f"{node.name}.mask")
    layer.decomposable = True
    return [layer.get_output(0)]


def _with_leading_dimensions_of_mask(emitter: NetworkEmitter, mask: Tensor, name: str) -> Tensor:
    """`[T, C]` -> `[1, 1, T, C]`; two dynamic sizes, so not by a reshape."""
    axes = _integer_constant(emitter, [0, 1], f"{name}.axes")
    return emitter.named(emitter.network.add_unsqueeze(mask, axes), name).get_output(0)


def _quantize(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    tensor, scale = (emitter.tensor(name) for name in node.input[:2])
    layer = emitter.network.add_quantize(tensor, scale, emitter.data_type(attribute(node, "output_dtype")))
    return [emitter.named(layer, node.name).get_output(0)]


def _dequantize(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
    """By one scale, by a scale for each index of an axis, or by blocks along the last axis."""
    tensor, scale = (emitter.tensor(name) for name in node.input[:2])
    layer = emitter.named(emitter.network.add_dequantize(tensor, scale, scale.dtype), node.name)
    if len(scale.shape) > 0:
        layer.axis = attribute(node, "axis", 1) % len(tensor.shape)
    return [layer.get_output(0)]


OPERATORS: dict[tuple[str, str], Operator] = {
    ("", "Abs"): _unary("ABS"),
    ("", "Add"): _elementwise("SUM"),
    ("", "And"): _elementwise("AND"),
    ("", "Attention"): _attention,
    ("", "Cast"): _cast,
    ("", "Concat"): _concat,
    ("", "Cos"): _unary("COS"),
    ("", "DequantizeLinear"): _dequantize,
    ("", "Div"): _elementwise("DIV"),
    ("", "Equal"): _elementwise("EQUAL"),
    ("", "Gather"): _gather,
    ("", "Greater"): _elementwise("GREATER"),
    ("", "GreaterOrEqual"): _greater_or_equal,
    ("", "Identity"): _identity,
    ("", "Less"): _elementwise("LESS"),
    ("", "LessOrEqual"): _less_or_equal,
    ("", "MatMul"): _matmul,
    ("", "Max"): _elementwise("MAX"),
    ("", "Mul"): _elementwise("PROD"),
    ("", "Neg"): _unary("NEG"),
    ("", "QuantizeLinear"): _quantize,
    ("", "RMSNormalization"): _rms_normalization,
    ("", "Range"): _range,
    ("", "ReduceMax"): _reduce("MAX"),
    ("", "ReduceSum"): _reduce("SUM"),
    ("", "Reshape"): _reshape,
    ("", "ScatterND"): _scatter_nd,
    ("", "Shape"): _shape,
    ("", "Sigmoid"): _activation("SIGMOID"),
    ("", "Sin"): _unary("SIN"),
    ("", "Slice"): _slice,
    ("", "Softmax"): _softmax,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Sub"): _elementwise("SUB"),
    ("", "Tanh"): _activation("TANH"),
    ("", "Transpose"): _transpose,
    ("", "Where"): _where,
}
"""(domain, operator type) -> what adds its layers."""
