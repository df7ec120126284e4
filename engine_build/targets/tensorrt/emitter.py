"""From the nodes of an ONNX network to the layers of a TensorRT one, through a handle to the module that builds it.

`tensorrt` and `tensorrt_rtx` have the same network calls; nothing here knows which of them it speaks to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from engine_build.targets.interface import TargetError
from engine_build.targets.tensorrt.weight_file import ConstantReader

Tensor = Any
"""An `ITensor` of the module at hand."""
Operator = Callable[["NetworkEmitter", onnx.NodeProto], Sequence[Tensor]]

_DATA_TYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT8E4M3FN: "fp8",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT4: "int4",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
}
"""ONNX element type -> the module's attribute of that name."""


class NetworkEmitter:
    """Adds one ONNX graph to an `INetworkDefinition`."""

    def __init__(
        self,
        trt: Any,
        network: Any,
        constants: ConstantReader,
        operators: dict[tuple[str, str], Operator],
    ) -> None:
        """
        Args:
            trt: the module `tensorrt` or `tensorrt_rtx`.
            network: an empty `INetworkDefinition` of that module.
            constants: the graph's initializers; must live until the plan is built.
            operators: `(domain, operator type)` -> what adds its layers.
        """
        self.trt = trt
        self.network = network
        self.constants = constants
        self._operators = operators
        self._values: dict[str, Tensor] = {}
        self._producers: dict[str, onnx.NodeProto] = {}

    def emit(self, graph: onnx.GraphProto) -> None:
        """Declare inputs, add every node, mark outputs.

        Raises:
            TargetError: an operator, or a type, that has no counterpart; a layer the module refuses.
        """
        for value in graph.input:
            shape = [size.dim_value if size.HasField("dim_value") else -1 for size in value.type.tensor_type.shape.dim]
            self._values[value.name] = self.network.add_input(
                value.name, self.data_type(value.type.tensor_type.elem_type), tuple(shape)
            )
        self._producers = {output: node for node in graph.node for output in node.output}
        for node in graph.node:
            self._emit_node(node)
        for value in graph.output:
            tensor = self.tensor(value.name)
            tensor.name = value.name
            self.network.mark_output(tensor)

    def tensor(self, name: str) -> Tensor:
        """The value of that name; a constant becomes a layer when it is first asked for."""
        if name not in self._values:
            constant = self.constants.constant(name)
            self._values[name] = self.constant(name, constant.data_type, constant.shape)
        return self._values[name]

    def constant(self, name: str, data_type: int, shape: Sequence[int]) -> Tensor:
        """A constant layer over an initializer's bytes, in any shape of as many elements."""
        content = self.constants.constant(name).content
        count = 1
        for size in shape:
            count *= size
        weights = self.trt.Weights(self.data_type(data_type), content.ctypes.data, count)
        return self.named(self.network.add_constant(tuple(shape), weights), name).get_output(0)

    def define(self, name: str, tensor: Tensor) -> None:
        """Give a name to a value that no node of the graph has as an output."""
        self._values[name] = tensor

    def small_constant(self, name: str, data_type: int, values: Sequence[float], shape: Sequence[int]) -> Tensor:
        """A constant that the graph does not have, kept until the plan is built."""
        array = np.array(values, helper.tensor_dtype_to_np_dtype(data_type))
        self.constants.keep(array)
        weights = self.trt.Weights(self.data_type(data_type), array.ctypes.data, array.size)
        return self.named(self.network.add_constant(tuple(shape), weights), name).get_output(0)

    def named(self, layer: Any, name: str) -> Any:
        """Give a new layer its name, or say that the module has refused it."""
        if layer is None:
            raise TargetError(f"{self.trt.__name__} refuses the layer {name}; its log says why")
        layer.name = name
        return layer

    def data_type(self, data_type: int) -> Any:
        """The module's name for an ONNX element type."""
        if data_type not in _DATA_TYPES:
            raise TargetError(f"type {helper.tensor_dtype_to_string(data_type)} has no counterpart in TensorRT")
        return getattr(self.trt, _DATA_TYPES[data_type])

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that gives the value `name`; `None` for inputs and constants."""
        return self._producers.get(name)

    def _emit_node(self, node: onnx.NodeProto) -> None:
        operator = self._operators.get((node.domain, node.op_type))
        if operator is None:
            raise TargetError(f"node {node.name}: operator {node.op_type} has no counterpart in TensorRT")
        try:
            outputs = operator(self, node)
            for output in outputs:
                output.shape  # noqa: B018, inferred when asked for: an operand that does not fit is found here, by name
        except (RuntimeError, TypeError) as error:  # what the bindings raise for shapes and types that do not fit
            raise TargetError(f"{self.trt.__name__} refuses node {node.name} ({node.op_type}): {error}") from error
        self._values.update(zip(node.output, outputs, strict=True))


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """A node's attribute as a Python value."""
    for candidate in node.attribute:
        if candidate.name == name:
            return helper.get_attribute_value(candidate)
    return default
