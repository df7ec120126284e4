"""What the reference engine refuses to load, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from executor.engines.reference_graph import ReferenceGraph, UnsupportedGraphError
from tests.engine_build.tiny_checkpoint import TinyCheckpoint
from tests.executor.tiny_engine import write_tiny_network

CPU = torch.device("cpu")


def write_graph(
    path: Path,
    *nodes: onnx.NodeProto,
    opset: int = 23,
    own_version: int = 1,
    input_type: int = TensorProto.FLOAT,
    constants: dict[str, np.ndarray] | None = None,
) -> Path:
    """A graph from `x` [N] to `y`."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", input_type, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("inflight", own_version)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return path


def node(operator: str, *inputs: str, domain: str = "", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, ["y"], name="the_node", domain=domain, **attributes)


def test_a_graph_runs_with_what_depends_on_constants_alone_computed_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "a"], ["b"]), helper.make_node("Mul", ["x", "b"], ["y"])]
    path = write_graph(tmp_path / "model.onnx", *nodes, constants={"a": np.array([1, 2], np.float32)})
    graph = ReferenceGraph(path, CPU)
    (first,), (second,) = (graph.run({"x": torch.tensor([value, value])}) for value in (1.0, 3.0))
    assert first.tolist() == [2, 4]
    assert second.tolist() == [6, 12]


Write = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: write_graph(path, node("Erf", "x")), "'the_node' is a Erf, which .* Add, Cast"),
        (
            lambda path: write_graph(path, node("FlashAttention", "x", domain="inflight")),
            "'the_node' is a inflight.FlashAttention.* inflight.PagedAttention",
        ),
        (lambda path: write_graph(path, node("Transpose", "x", order=[0])), "Transpose with 1 inputs.*'order'"),
        (lambda path: write_graph(path, node("Neg", "x", "x")), "Neg with 2 inputs"),
        (lambda path: write_graph(path, node("Gather", "x")), "Gather with 1 inputs .*'indices'"),
        (lambda path: write_graph(path, node("Neg", "x"), opset=13), "opset 13; it must be 18 or newer"),
        (lambda path: write_graph(path, node("Neg", "x"), own_version=2), "version 2 of domain inflight"),
        (lambda path: write_graph(path, node("Neg", "x"), input_type=TensorProto.DOUBLE), "input x is of type DOUBLE"),
        (lambda path: write_graph(path, node("Cast", "x", to=TensorProto.DOUBLE)), "'the_node' is of type DOUBLE"),
        (lambda path: path.write_bytes(b"not a model") and path, "is not a readable ONNX model"),
        (lambda path: path, "is not a readable ONNX model"),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_loaded(write: Write, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx")
    with pytest.raises(UnsupportedGraphError, match=message) as refusal:
        ReferenceGraph(path, CPU)
    assert str(path) in str(refusal.value)


def test_truncated_weights_are_refused_with_the_tensor_and_the_sizes(tmp_path: Path) -> None:
    path = write_tiny_network(TinyCheckpoint(), tmp_path)
    data = path.with_name("model.data")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(UnsupportedGraphError, match=rf"needs \d+ bytes .* has {data.stat().st_size} bytes"):
        ReferenceGraph(path, CPU)


def test_missing_weights_are_refused_with_the_path_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_network(TinyCheckpoint(), tmp_path)
    path.with_name("model.data").unlink()
    with pytest.raises(UnsupportedGraphError, match=r"model\.data, which cannot be mapped"):
        ReferenceGraph(path, CPU)


def test_running_a_graph_leaves_its_weight_file_as_it_was(tmp_path: Path) -> None:
    path = write_tiny_network(TinyCheckpoint(), tmp_path)
    before = path.with_name("model.data").read_bytes()
    graph = ReferenceGraph(path, CPU)
    for constant in graph._constants.values():
        constant.add_(1)
    assert path.with_name("model.data").read_bytes() == before


def test_an_error_inside_a_step_names_the_node(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "model.onnx", node("Add", "x", "a"), constants={"a": np.zeros(3, np.float32)})
    with pytest.raises(RuntimeError) as failure:
        ReferenceGraph(path, CPU).run({"x": torch.zeros(2)})
    assert "'the_node'" in failure.value.__notes__[0]
