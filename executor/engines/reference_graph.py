"""An ONNX graph as a list of torch calls: loaded once, checked once, run every step.

```
model.onnx --parse--> nodes --look up--> (function, attributes) --constants folded--> calls
model.data --map----> weights (bytes stay on disk until a step touches them)
```
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor

from executor.engines.reference_operators import HOST_INPUTS, OPERATORS, TORCH_DTYPES, Operator

_MINIMUM_OPSET = 18  # before it, operators took as attributes what they take as inputs now
_OWN_DOMAIN = "inflight"
_OWN_VERSION = 1


class UnsupportedGraphError(ValueError):
    """A graph this engine cannot run: names the file, the node, and what would be right."""


class _Call(NamedTuple):
    """One node, ready to run."""

    function: Callable[..., Tensor | Sequence[Tensor]]
    inputs: tuple[str, ...]
    """Names of values; an empty name is an optional input left out."""
    outputs: tuple[str, ...]
    last_uses: tuple[str, ...]
    """Values nothing reads after this call."""
    where: str


class ReferenceGraph:
    """A loaded graph. `run` has no state besides what the operators write into the tensors they are given."""

    def __init__(
        self, model_path: Path, device: torch.device, operators: Mapping[tuple[str, str], Operator] = OPERATORS
    ) -> None:
        """Load, check and fold.

        Args:
            model_path: an ONNX file; its external data lies beside it.
            device: where constants are put and calls run.
            operators: (domain, operator type) -> what computes it.

        Raises:
            UnsupportedGraphError: not an ONNX model, truncated weights, or a node no function here defines.
        """
        self._path = model_path
        self._operators = operators
        try:
            model = onnx.load(model_path, load_external_data=False)
        except (OSError, DecodeError) as error:
            raise UnsupportedGraphError(f"{model_path} is not a readable ONNX model: {error}") from error
        self._check_opsets(model)
        graph = model.graph
        self.inputs: dict[str, torch.dtype] = {
            value.name: self._dtype(value.type.tensor_type.elem_type, f"input {value.name}") for value in graph.input
        }
        """Name -> dtype of what `run` must be given."""
        self._outputs = tuple(value.name for value in graph.output)
        self._files: dict[str, np.memmap] = {}
        on_host = _host_constants(graph)
        self._constants = {
            tensor.name: self._constant(tensor).to("cpu" if tensor.name in on_host else device)
            for tensor in graph.initializer
        }
        with torch.inference_mode():
            self._calls = self._fold([self._call(node) for node in graph.node])

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the graph's outputs, in the graph's order, from its inputs by name."""
        values = {**self._constants, **inputs}
        for call in self._calls:
            results = _run(call, values)
            for name in call.last_uses:
                del values[name]
            values.update(zip(call.outputs, results, strict=True))
        return tuple(values[name] for name in self._outputs)

    def _check_opsets(self, model: onnx.ModelProto) -> None:
        versions = {opset.domain or "": opset.version for opset in model.opset_import}
        for domain, version in versions.items():
            if domain == "" and version < _MINIMUM_OPSET:
                raise UnsupportedGraphError(
                    f"{self._path} uses ONNX opset {version}; it must be {_MINIMUM_OPSET} or newer"
                )
            if domain == _OWN_DOMAIN and version != _OWN_VERSION:
                raise UnsupportedGraphError(
                    f"{self._path} uses version {version} of domain {domain}; this engine has {_OWN_VERSION}"
                )

    def _dtype(self, element_type: int, what: str) -> torch.dtype:
        dtype = TORCH_DTYPES.get(element_type)
        if dtype is None:
            known = ", ".join(onnx.TensorProto.DataType.Name(known) for known in TORCH_DTYPES)
            name = onnx.TensorProto.DataType.Name(element_type)
            raise UnsupportedGraphError(f"{self._path}: {what} is of type {name}; supported: {known}")
        return dtype

    def _constant(self, tensor: onnx.TensorProto) -> Tensor:
        """A weight: mapped from the external data file, or copied out of the model when it is stored inside."""
        dtype = self._dtype(tensor.data_type, f"constant {tensor.name}")
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(tensor)
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        else:
            info = ExternalDataInfo(tensor)
            data = self._file(info.location, tensor.name)
            begin = info.offset or 0
            num_bytes = math.prod(tensor.dims) * dtype.itemsize
            raw = data[begin : begin + num_bytes]
            if len(raw) != num_bytes or (info.length is not None and info.length != num_bytes):
                raise UnsupportedGraphError(
                    f"{self._path}: constant {tensor.name} needs {num_bytes} bytes at offset {begin} of "
                    f"{info.location}, which has {len(data)} bytes"
                )
        return torch.from_numpy(raw).view(dtype).reshape(tuple(tensor.dims))

    def _file(self, location: str, tensor_name: str) -> np.memmap:
        if location not in self._files:
            path = self._path.parent / location
            try:
                # Copy on write: torch wants writable memory, the file must never change.
                self._files[location] = np.memmap(path, np.uint8, mode="c")
            except (OSError, ValueError) as error:
                raise UnsupportedGraphError(
                    f"{self._path}: constant {tensor_name} lies in {path}, which cannot be mapped: {error}"
                ) from error
        return self._files[location]

    def _call(self, node: onnx.NodeProto) -> _Call:
        where = f"{self._path}: node {node.name or node.output[0]!r}"
        function = self._operators.get((node.domain, node.op_type))
        if function is None:
            known = ", ".join(sorted(".".join(filter(None, key)) for key in self._operators))
            wanted = ".".join(filter(None, (node.domain, node.op_type)))
            raise UnsupportedGraphError(f"{where} is a {wanted}, which the reference engine lacks; it has {known}")
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "Cast":
            self._dtype(attributes["to"], f"node {node.name!r}")
        try:
            inspect.signature(function).bind(*node.input, **attributes)
        except TypeError as error:
            raise UnsupportedGraphError(
                f"{where}: {node.op_type} with {len(node.input)} inputs and attributes {sorted(attributes)}: {error}"
            ) from error
        return _Call(partial(function, **attributes), tuple(node.input), tuple(node.output), (), where)

    def _fold(self, calls: list[_Call]) -> list[_Call]:
        """Run now what depends on constants only; mark in the others the last use of every value."""
        remaining: list[_Call] = []
        for call in calls:
            if all(name in self._constants or not name for name in call.inputs):
                self._constants.update(zip(call.outputs, _run(call, self._constants), strict=True))
            else:
                remaining.append(call)
        needed = {name for call in remaining for name in call.inputs} | set(self._outputs)
        self._constants = {name: value for name, value in self._constants.items() if name in needed}

        kept = set(self._constants) | set(self.inputs) | set(self._outputs)
        seen: set[str] = set(kept)
        marked: list[_Call] = []
        for call in reversed(remaining):
            last_uses = tuple(sorted({name for name in call.inputs if name} - seen))
            seen.update(last_uses)
            marked.append(call._replace(last_uses=last_uses))
        return marked[::-1]


def _host_constants(graph: onnx.GraphProto) -> set[str]:
    """Constants that only say how to cut or shape: kept where they are read, so that no step waits for a device."""
    uses = [
        (name, position in HOST_INPUTS.get(node.op_type, ()))
        for node in graph.node
        for position, name in enumerate(node.input)
    ]
    return {name for name, is_host in uses if is_host} - {name for name, is_host in uses if not is_host}


def _run(call: _Call, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
    try:
        results = call.function(*(values[name] if name else None for name in call.inputs))
    except Exception as error:
        error.add_note(call.where)
        raise
    return (results,) if isinstance(results, Tensor) else results
