"""Constants of an ONNX network where they lie: memory-mapped, handed to a builder by address."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import external_data_helper, numpy_helper


class Constant(NamedTuple):
    """One initializer."""

    data_type: int
    """An `onnx.TensorProto` type."""
    shape: tuple[int, ...]
    content: NDArray[np.uint8]
    """Bytes as ONNX stores them: 4-bit numbers two to a byte, the first in the low half."""


class ConstantReader:
    """Gives initializers by name. Must outlive the builder, which reads the weights where this keeps them."""

    def __init__(self, model: onnx.ModelProto, directory: Path) -> None:
        self._directory = directory
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._files: dict[str, NDArray[np.uint8]] = {}
        self._constants: dict[str, Constant] = {}
        self._kept: list[NDArray[Any]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def constant(self, name: str) -> Constant:
        if name not in self._constants:
            tensor = self._tensors[name]
            self._constants[name] = Constant(tensor.data_type, tuple(tensor.dims), self._content(tensor))
        return self._constants[name]

    def integers(self, name: str) -> list[int]:
        """The elements of a small integer constant."""
        values: list[int] = numpy_helper.to_array(self._tensors[name]).reshape(-1).tolist()
        return values

    def keep(self, array: NDArray[Any]) -> None:
        """Keep an array that was made on the way, since a builder reads it by its address."""
        self._kept.append(array)

    def _content(self, tensor: onnx.TensorProto) -> NDArray[np.uint8]:
        if external_data_helper.uses_external_data(tensor):
            where = external_data_helper.ExternalDataInfo(tensor)
            return self._file(where.location)[where.offset : where.offset + where.length]
        array: NDArray[Any] = numpy_helper.to_array(tensor)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _file(self, location: str) -> NDArray[np.uint8]:
        if location not in self._files:
            self._files[location] = np.memmap(self._directory / location, np.uint8, "r")
        return self._files[location]
