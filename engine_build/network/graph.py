"""Puts an ONNX graph together node by node, streaming weights to one external data file as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

MODEL_FILE = "model.onnx"
DATA_FILE = "model.data"

_OPSET = 23
_IR_VERSION = 11
_ALIGNMENT = 4096
"""Bytes. Each weight starts on a page, so that it can be memory-mapped on its own."""


class GraphBuilder:
    """One graph under construction, writing into a directory.

    Values are known by name; every method that makes one returns its name. A node has the name of its output.
    Use as a context manager: the data file is open in between.
    """

    def __init__(self, directory: Path, domains: dict[str, int]) -> None:
        self._directory = directory
        self._opsets = [
            helper.make_opsetid("", _OPSET),
            *(helper.make_opsetid(domain, version) for domain, version in domains.items()),
        ]
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._data: BinaryIO | None = None

    def __enter__(self) -> GraphBuilder:
        self._data = (self._directory / DATA_FILE).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None

    def input(self, name: str, dtype: np.dtype[Any], shape: Sequence[int | str]) -> str:
        """Declare a graph input; a string in the shape is the name of a dynamic dimension."""
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: np.dtype[Any], shape: Sequence[int | str]) -> None:
        """Declare that the value `name` leaves the graph."""
        self._outputs.append(_value_info(name, dtype, shape))

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        name: str,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node with one output."""
        self._nodes.append(helper.make_node(operator, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def split(self, value: str, sizes: Sequence[int], names: Sequence[str]) -> Sequence[str]:
        """Cut `value` along its last axis."""
        lengths = self.integers(f"{value}.sizes", sizes)
        self._nodes.append(helper.make_node("Split", [value, lengths], names, name=f"{value}.split", axis=-1))
        return names

    def cast(self, value: str, dtype: np.dtype[Any], name: str) -> str:
        return self.node("Cast", [value], name, to=helper.np_dtype_to_tensor_dtype(dtype))

    def reshape(self, value: str, shape: Sequence[int], name: str) -> str:
        """Reshape; one entry may be -1."""
        return self.node("Reshape", [value, self.integers(f"{name}.shape", shape)], name)

    def integers(self, name: str, values: Sequence[int]) -> str:
        """A small int64 constant, kept in the model file."""
        self._initializers[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def scalar(self, name: str, value: float, dtype: np.dtype[Any]) -> str:
        """A constant without dimensions, kept in the model file."""
        self._initializers[name] = onnx.numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def weight(self, name: str, dtype: np.dtype[Any], shape: Sequence[int], parts: Iterable[NDArray[Any]]) -> str:
        """A constant in the data file, written part by part along its first axis; `int4` two to a byte.

        Raises:
            ValueError: the parts do not add up to `shape`.
        """
        if self._data is None:
            raise ValueError("a weight can only be written while the builder is open")
        offset = -(-self._data.tell() // _ALIGNMENT) * _ALIGNMENT
        self._data.seek(offset)
        for part in parts:
            self._data.write(_stored_bytes(np.ascontiguousarray(part, dtype=dtype)).data)
        length = self._data.tell() - offset
        if length * 8 != _bits(dtype) * int(np.prod(shape)):
            raise ValueError(f"{name}: {length} bytes written, shape {tuple(shape)} of {dtype} takes another number")
        tensor = TensorProto(
            name=name,
            dims=shape,
            data_type=helper.np_dtype_to_tensor_dtype(dtype),
            data_location=TensorProto.EXTERNAL,
        )
        for key, entry in (("location", DATA_FILE), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=entry)
        self._initializers[name] = tensor
        return name

    def save(self, name: str, description: str) -> None:
        """Check the graph and write the model file. Call it last, when every weight is written."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()), description
        )
        model = helper.make_model(
            graph, opset_imports=self._opsets, ir_version=_IR_VERSION, producer_name="inflight-executor"
        )
        path = self._directory / MODEL_FILE
        path.write_bytes(model.SerializeToString(deterministic=True))
        if self._data is not None:
            self._data.flush()
        onnx.checker.check_model(path)


def _bits(dtype: np.dtype[Any]) -> int:
    return 4 if dtype == ml_dtypes.int4 else 8 * dtype.itemsize


def _stored_bytes(part: NDArray[Any]) -> NDArray[np.uint8]:
    """As ONNX stores it: of two 4-bit numbers, the first in the low half."""
    flat = part.reshape(-1)
    if part.dtype != ml_dtypes.int4:
        return flat.view(np.uint8)
    halves = flat.astype(np.int8).view(np.uint8) & 0x0F
    return (halves[0::2] | halves[1::2] << 4).astype(np.uint8)


def _value_info(name: str, dtype: np.dtype[Any], shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
