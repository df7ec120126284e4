"""From checkpoint tensors to constants of the graph: fused, converted or quantized, a slab of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.interface import Checkpoint, DenseTensor, GroupQuantizedTensor, Tensor
from engine_build.checkpoint.weight_shapes import weight_shapes
from engine_build.network.graph import GraphBuilder
from engine_build.network.options import DTYPES, NetworkError, NetworkOptions
from engine_build.network.quantization import QUANTIZED_FORMATS, QuantizedFormat

GROUP_SIZE = 32
"""Weights that share one scale, along the input features."""

_SLAB_ROWS = 4096
"""Rows converted at once: bounds the memory beside the tensor itself."""

ProgressCallback = Callable[[int, int], None]


def quantize(weights: NDArray[np.float32]) -> GroupQuantizedTensor:
    """Round a matrix `[out, in]` to 8-bit groups of 32: symmetric, `scale = max|w| / 127` in float16.

    Weights that are not finite, or too large for a float16 scale, give a scale that is not finite.
    """
    groups = weights.reshape(weights.shape[0], -1, GROUP_SIZE)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(axis=-1) / 127.0).astype(np.float16)
        # Divide by the scale as it is stored, so that its own rounding is made up for. A group too small for a
        # float16 scale is 0.
        divisor = np.where(scales == 0, np.inf, scales.astype(np.float32))
        values = np.clip(np.rint(groups / divisor[:, :, None]), -127, 127).astype(np.int8)
    return GroupQuantizedTensor(values.reshape(weights.shape), scales)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix `[out, in]` in the graph: dense (`scales` is `None`), in a `format`, or in 8-bit groups."""

    name: str
    shape: tuple[int, int]
    values: str
    scales: str | None
    format: QuantizedFormat | None = None
    block_size: int = 0
    """Columns that share a factor of `format`; 0 for whole rows."""


class WeightWriter:
    """Takes tensors from a checkpoint by name and writes them into the graph.

    A checkpoint's tensors have the shapes that its configuration implies: its reader has seen to that.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        checkpoint: Checkpoint,
        options: NetworkOptions,
        progress: ProgressCallback | None,
    ) -> None:
        self._graph = graph
        self._checkpoint = checkpoint
        self._dtype = DTYPES[options.dtype]
        self._activation_dtype = DTYPES[options.activation_dtype]
        self._groups = options.quantized_as == "groups"
        self._quantize = self._groups and options.weight_dtype == "int8"
        self._format = None if self._groups else QUANTIZED_FORMATS.get(options.weight_dtype)
        self._progress = progress
        self._num_taken = 0
        self._num_tensors = len(weight_shapes(checkpoint.config))

    def vector(self, source_names: Sequence[str], size: int, name: str) -> str:
        """Write vectors of the checkpoint, one behind the other, as one of `size` elements in activations' dtype."""
        parts = (self._converted(_dense(self._take(source)), source, self._activation_dtype) for source in source_names)
        return self._graph.weight(name, self._activation_dtype, [size], parts)

    def matrix(
        self,
        source_names: Sequence[str],
        shape: tuple[int, int],
        name: str,
        *,
        keep_groups: bool = True,
        is_vocabulary: bool = False,
    ) -> Matrix:
        """Write matrices of the checkpoint, rows below rows, as one of `shape`.

        Parts in 8-bit groups stay so if all of them are and `keep_groups` is true, else they become dense. The
        embedding and the head (`is_vocabulary`) are not written in a format of `DequantizeLinear`.
        """
        parts = {source: self._take(source) for source in source_names}
        if self._format is not None and not is_vocabulary:
            return self._write_formatted(parts, shape, name, self._format)
        if self._quantize and shape[1] % GROUP_SIZE:
            raise NetworkError(
                f"{', '.join(source_names)}: {shape[1]} columns do not make groups of {GROUP_SIZE}: "
                "weight_dtype int8 is not possible, as_stored is"
            )
        are_groups = all(isinstance(part, GroupQuantizedTensor) for part in parts.values())
        if self._quantize or (self._groups and keep_groups and are_groups):
            return self._write_quantized(parts, shape, name)
        slabs = (
            self._converted(slab, source, self._dtype) for source, part in parts.items() for slab in _float_slabs(part)
        )
        return Matrix(name, shape, self._graph.weight(name, self._dtype, shape, slabs), None)

    def _take(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        self._num_taken += 1
        if self._progress is not None:
            self._progress(self._num_taken, self._num_tensors)
        return tensor

    def _write_quantized(self, parts: Mapping[str, Tensor], shape: tuple[int, int], name: str) -> Matrix:
        rows, groups = shape[0], shape[1] // GROUP_SIZE
        scales: list[NDArray[np.float16]] = []

        def values() -> Iterator[NDArray[np.int8]]:
            for source, part in parts.items():
                for slab in _quantized_slabs(part):
                    if not np.isfinite(slab.scales).all():
                        raise NetworkError(f"{source} has weights that are not finite or too large for float16 scales")
                    scales.append(slab.scales)
                    yield slab.values

        value_name = self._graph.weight(f"{name}.values", np.dtype(np.int8), [rows, groups, GROUP_SIZE], values())
        scale_name = self._graph.weight(f"{name}.scales", np.dtype(np.float16), [rows, groups, 1], scales)
        return Matrix(name, shape, value_name, scale_name)

    def _write_formatted(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], name: str, format_: QuantizedFormat
    ) -> Matrix:
        rows, columns = shape
        block_size = format_.block_size(columns, ", ".join(parts))
        factors: list[NDArray[np.generic]] = []

        def values() -> Iterator[NDArray[np.generic]]:
            for source, part in parts.items():
                for slab in _float_slabs(part):
                    weights = slab.astype(np.float32)
                    factors.append(format_.factors(weights, block_size, self._activation_dtype))
                    if not np.isfinite(factors[-1].astype(np.float32)).all():
                        raise NetworkError(f"{source} has weights that are not finite or too large for their factors")
                    yield format_.values(weights, factors[-1])

        value_name = self._graph.weight(f"{name}.values", format_.dtype, shape, values())
        by_row = not format_.block_sizes
        factor_shape = [rows] if by_row else [rows, columns // block_size]
        factor_name = self._graph.weight(f"{name}.scales", self._activation_dtype, factor_shape, factors)
        return Matrix(name, shape, value_name, factor_name, format_, 0 if by_row else block_size)

    def _converted(self, values: NDArray[np.generic], source: str, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        with np.errstate(over="ignore"):  # reported below, by name
            converted = values.astype(dtype)
        if dtype == np.float16 and not np.isfinite(converted).all():
            raise NetworkError(f"{source} has weights beyond the range of float16: use bfloat16 or float32")
        return converted


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tensor.data.shape if isinstance(tensor, DenseTensor) else tensor.values.shape


def _dense(tensor: Tensor) -> NDArray[np.generic]:
    return tensor.data if isinstance(tensor, DenseTensor) else tensor.to_float32()


def _row_slabs(rows: int) -> Iterator[slice]:
    return (slice(start, start + _SLAB_ROWS) for start in range(0, rows, _SLAB_ROWS))


def _float_slabs(tensor: Tensor) -> Iterator[NDArray[np.generic]]:
    for rows in _row_slabs(_shape(tensor)[0]):
        if isinstance(tensor, DenseTensor):
            yield tensor.data[rows]
        else:
            yield GroupQuantizedTensor(tensor.values[rows], tensor.scales[rows]).to_float32()


def _quantized_slabs(tensor: Tensor) -> Iterator[GroupQuantizedTensor]:
    for rows in _row_slabs(_shape(tensor)[0]):
        if isinstance(tensor, GroupQuantizedTensor):
            yield GroupQuantizedTensor(tensor.values[rows], tensor.scales[rows])
        else:
            yield quantize(tensor.data[rows].astype(np.float32))
