"""GGUF tensor types -> the two kinds of `Tensor`."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray

from engine_build.checkpoint.interface import DenseTensor, GroupQuantizedTensor, Tensor

_FLOAT_DTYPES: dict[GgmlType, np.dtype[np.generic]] = {
    GgmlType.F32: np.dtype(np.float32),
    GgmlType.F16: np.dtype(np.float16),
    GgmlType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_DEQUANTIZED = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q6_K)

FLOAT_TYPES = tuple(_FLOAT_DTYPES)
SUPPORTED_TYPES = (*FLOAT_TYPES, GgmlType.Q8_0, *_DEQUANTIZED)

_Q8_0_GROUP = 32
_Q8_0_SCALE_BYTES = 2


def float_type_name(type_: GgmlType) -> str | None:
    """`float32`, `float16`, `bfloat16`, or `None` for a quantized type."""
    return _FLOAT_DTYPES[type_].name if type_ in _FLOAT_DTYPES else None


def is_group_quantized(type_: GgmlType, shape: tuple[int, ...]) -> bool:
    """Whether `decode` gives a `GroupQuantizedTensor`."""
    return type_ is GgmlType.Q8_0 and len(shape) == 2


def decode(rows: NDArray[np.uint8], type_: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """Turn stored bytes into numbers.

    Floating-point types and Q8_0 matrices keep what is stored; the other types become `float32`, which holds
    their values exactly up to the rounding of `scale * value + minimum` itself.

    Args:
        rows: `[rows, bytes per row]`.
        type_: one of `SUPPORTED_TYPES`.
        shape: elements, slowest dimension first.
    """
    if type_ in _FLOAT_DTYPES:
        return DenseTensor(np.ascontiguousarray(rows).view(_FLOAT_DTYPES[type_]).reshape(shape))
    if is_group_quantized(type_, shape):
        return _q8_0(rows, shape)
    return DenseTensor(gguf.quants.dequantize(rows, type_).reshape(shape))


def _q8_0(rows: NDArray[np.uint8], shape: tuple[int, ...]) -> GroupQuantizedTensor:
    """Each group of 32 is stored as a float16 scale and 32 signed bytes."""
    groups = rows.reshape(shape[0], shape[1] // _Q8_0_GROUP, _Q8_0_SCALE_BYTES + _Q8_0_GROUP)
    scales = np.ascontiguousarray(groups[:, :, :_Q8_0_SCALE_BYTES]).view("<f2").reshape(shape[0], -1)
    values = np.ascontiguousarray(groups[:, :, _Q8_0_SCALE_BYTES:]).view(np.int8).reshape(shape)
    return GroupQuantizedTensor(values=values, scales=scales)
