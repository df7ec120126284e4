"""From checkpoint tensors to constants of the graph: fused, converted or quantized, a slab of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.interface import Checkpoint, DenseTensor, GroupQuantizedTensor, Tensor
from engine_build.network.graph import GraphBuilder
from engine_build.network.options import DTYPES, NetworkError, NetworkOptions

GROUP_SIZE = 32
"""Weights that share one scale, along the input features."""

_SLAB_ROWS = 4096
"""Rows converted at once: bounds the memory beside the tensor itself."""

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and that follow from the configuration."""

ProgressCallback = Callable[[int, int], None]


def quantize(weights: NDArray[np.float32]) -> GroupQuantizedTensor:
    """Round a matrix `[out, in]` to 8-bit groups of 32: symmetric, `scale = max|w| / 127` in float16."""
    groups = weights.reshape(weights.shape[0], -1, GROUP_SIZE)
    scales = (np.abs(groups).max(axis=-1) / 127.0).astype(np.float16)
    # Divide by the scale as it is stored, so that its own rounding is made up for; a group too small for float16 is 0.
    divisor = np.where(scales == 0, np.inf, scales.astype(np.float32))
    values = np.clip(np.rint(groups / divisor[:, :, None]), -127, 127).astype(np.int8)
    return GroupQuantizedTensor(values.reshape(weights.shape), scales)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix `[out, in]` in the graph: dense (`scales` is `None`), or 8-bit groups with their scales."""

    name: str
    shape: tuple[int, int]
    values: str
    scales: str | None


class WeightWriter:
    """Takes tensors from a checkpoint by name, writes them into the graph, and keeps count of what was used."""

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
        self._quantize = options.weight_dtype == "int8"
        self._progress = progress
        self._unused = {name for name in checkpoint.names() if not name.endswith(_IGNORED_SUFFIXES)}
        self._total = len(self._unused)

    def has(self, name: str) -> bool:
        return name in self._unused

    def vector(self, source_names: Sequence[str], size: int, name: str) -> str:
        """Write vectors of the checkpoint, one behind the other, as one of `size` elements of activations' dtype."""
        parts = [self._take(source) for source in source_names]
        total = sum(part.shape[0] for part in map(_dense, parts))
        if total != size:
            raise NetworkError(f"{' + '.join(source_names)}: {total} elements, the configuration implies {size}")
        vectors = (_dense(part).astype(self._activation_dtype) for part in parts)
        return self._graph.weight(name, self._activation_dtype, [size], vectors)

    def matrix(self, source_names: Sequence[str], shape: tuple[int, int], name: str) -> Matrix:
        """Write matrices of the checkpoint, rows below rows, as one of `shape`.

        Parts in 8-bit groups stay so if all of them are; mixed parts become dense.
        """
        parts = [self._take(source) for source in source_names]
        for source, part in zip(source_names, parts, strict=True):
            self._check_matrix(source, part, shape[1])
        rows = sum(_shape(part)[0] for part in parts)
        if rows != shape[0]:
            raise NetworkError(f"{' + '.join(source_names)}: {rows} rows, the configuration implies {shape[0]}")
        if self._quantize or all(isinstance(part, GroupQuantizedTensor) for part in parts):
            return self._write_quantized(parts, shape, name)
        slabs = (slab.astype(self._dtype) for part in parts for slab in _float_slabs(part))
        return Matrix(name, shape, self._graph.weight(name, self._dtype, shape, slabs), None)

    def check_all_used(self) -> None:
        """Raise `NetworkError` if the checkpoint has weights this network does not know."""
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise NetworkError(
                f"{self._checkpoint.source} has weights that a {self._checkpoint.config.architecture} network does "
                f"not use: {', '.join(names[:3])}{more}"
            )

    def _take(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        self._unused.discard(name)
        if self._progress is not None:
            self._progress(self._total - len(self._unused), self._total)
        return tensor

    def _check_matrix(self, source: str, part: Tensor, columns: int) -> None:
        shape = _shape(part)
        if len(shape) != 2 or shape[1] != columns:
            raise NetworkError(f"{source}: shape {shape}, the configuration implies [rows, {columns}]")
        if self._quantize and columns % GROUP_SIZE:
            raise NetworkError(f"{source}: {columns} columns; int8 groups need a multiple of {GROUP_SIZE}")

    def _write_quantized(self, parts: Sequence[Tensor], shape: tuple[int, int], name: str) -> Matrix:
        rows, groups = shape[0], shape[1] // GROUP_SIZE
        scales: list[NDArray[np.float16]] = []

        def values() -> Iterator[NDArray[np.int8]]:
            for part in parts:
                for slab in _quantized_slabs(part):
                    scales.append(slab.scales)
                    yield slab.values

        value_name = self._graph.weight(f"{name}.values", np.dtype(np.int8), [rows, groups, GROUP_SIZE], values())
        scale_name = self._graph.weight(f"{name}.scales", np.dtype(np.float16), [rows, groups, 1], scales)
        return Matrix(name, shape, value_name, scale_name)


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
