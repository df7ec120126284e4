"""The operators of the network, one small torch function each.

A function's positional parameters are the operator's inputs, its keyword-only parameters the operator's attributes;
`reference_graph` checks every node against this signature when a graph is loaded. Semantics: ONNX operator set 23.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from onnx import TensorProto
from torch import Tensor

from executor.engines.reference_attention import paged_attention

TORCH_DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}
"""ONNX element type -> torch dtype, for all types a network may hold."""

Operator = Callable[..., Tensor | Sequence[Tensor]]


def gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= data.dim()
    flat = data.index_select(axis, indices.reshape(-1))
    return flat.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


def transpose(data: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return data.permute(*(reversed(range(data.dim())) if perm is None else perm))


def reshape(data: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = shape.tolist()
    if not allowzero:
        sizes = [data.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return data.reshape(sizes)


def unsqueeze(data: Tensor, axes: Tensor) -> Tensor:
    wanted = axes.tolist()
    rank = data.dim() + len(wanted)
    for axis in sorted(axis % rank for axis in wanted):
        data = data.unsqueeze(axis)
    return data


def split(data: Tensor, sizes: Tensor, *, axis: int = 0) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = data.split(sizes.tolist(), dim=axis)
    return parts


def slice_(
    data: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    begins = starts.tolist()
    wanted_axes = range(len(begins)) if axes is None else axes.tolist()
    strides = [1] * len(begins) if steps is None else steps.tolist()
    window = [slice(None)] * data.dim()
    for axis, begin, end, stride in zip(wanted_axes, begins, ends.tolist(), strides, strict=True):
        window[axis] = slice(begin, end, stride)
    return data[tuple(window)]


def concat(*inputs: Tensor, axis: int) -> Tensor:
    return torch.cat(inputs, dim=axis)


def cast(data: Tensor, *, to: int) -> Tensor:
    return data.to(TORCH_DTYPES[to])


def rms_normalization(
    data: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = TensorProto.FLOAT
) -> Tensor:
    """`data / sqrt(mean(data ** 2) + epsilon) * scale` over the axes from `axis` on, in `stash_type`."""
    wide = data.to(TORCH_DTYPES[stash_type])
    dims = tuple(range(axis % data.dim(), data.dim()))
    normalized = wide * torch.rsqrt(wide.square().mean(dim=dims, keepdim=True) + epsilon)
    return normalized.to(data.dtype) * scale


def dequantize_linear(
    data: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1, block_size: int = 0
) -> Tensor:
    """`(data - zero_point) * scale`; scales per tensor, per index of `axis`, or per `block_size` along `axis`."""

    def spread(parameter: Tensor) -> Tensor:
        if block_size:
            return parameter.repeat_interleave(block_size, dim=axis)
        if parameter.dim() == 1:
            return parameter.reshape([-1 if dim == axis % data.dim() else 1 for dim in range(data.dim())])
        return parameter

    centred = data.to(scale.dtype)
    if zero_point is not None:
        centred = centred - spread(zero_point).to(scale.dtype)
    return centred * spread(scale)


ROWS_PER_TILE = 32
"""Rows that one matrix product takes."""


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`[M, K] @ [K, N]` in tiles of `ROWS_PER_TILE` rows, the last one filled up with zeros.

    A matrix library picks another order of summation for another number of rows, so a row's bits would depend on what
    else is in the step. With every product of one shape they don't.
    """
    num_rows = left.shape[0]
    num_tiles = -(-num_rows // ROWS_PER_TILE)
    padded = torch.nn.functional.pad(left, (0, 0, 0, num_tiles * ROWS_PER_TILE - num_rows))
    output = left.new_empty(len(padded), right.shape[1])
    for tile in range(0, len(padded), ROWS_PER_TILE):
        torch.mm(padded[tile : tile + ROWS_PER_TILE], right, out=output[tile : tile + ROWS_PER_TILE])
    return output[:num_rows]


OPERATORS: dict[tuple[str, str], Operator] = {
    ("", "Add"): lambda left, right: left + right,
    ("", "Cast"): cast,
    ("", "Concat"): concat,
    ("", "Cos"): lambda data: data.cos(),
    ("", "DequantizeLinear"): dequantize_linear,
    ("", "Gather"): gather,
    ("", "MatMul"): matmul,
    ("", "Mul"): lambda left, right: left * right,
    ("", "Neg"): lambda data: -data,
    ("", "RMSNormalization"): rms_normalization,
    ("", "Reshape"): reshape,
    ("", "Sigmoid"): lambda data: data.sigmoid(),
    ("", "Sin"): lambda data: data.sin(),
    ("", "Slice"): slice_,
    ("", "Split"): split,
    ("", "Transpose"): transpose,
    ("", "Unsqueeze"): unsqueeze,
    ("inflight", "PagedAttention"): paged_attention,
}
"""(domain, operator type) -> its definition."""

HOST_INPUTS: Mapping[str, Collection[int]] = {
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Unsqueeze": (1,),
}
"""Operator type -> positions of inputs whose values decide shapes; their functions read them on the host."""
