"""Our translation of a network beside that of NVIDIA's own ONNX parser, which TensorRT for RTX has as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_rtx as trt

from engine_build.network import MODEL_FILE, NetworkOptions, write_network
from engine_build.targets.interface import TargetError
from engine_build.targets.tensorrt.emitter import NetworkEmitter
from engine_build.targets.tensorrt.native_attention import lower_paged_attention
from engine_build.targets.tensorrt.operators import OPERATORS
from engine_build.targets.tensorrt.weight_file import ConstantReader
from tests.engine_build.lowered_network import with_soft_cap
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_CONFIG = tiny_config(hidden_size=128, head_size=32, intermediate_size=256, sliding_window=9, attention_bias=True)
_COMPARED = (
    "MATRIX_MULTIPLY",
    "SCATTER",
    "ATTENTION_INPUT",
    "ATTENTION_OUTPUT",
    "SOFTMAX",
    "SELECT",
    "QUANTIZE",
    "DEQUANTIZE",
)


def _tensors(network: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    return {tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in tensors}


def _layers(network: Any) -> dict[str, int]:
    kinds = Counter(network.get_layer(index).type for index in range(network.num_layers))
    return {kind: kinds[getattr(trt.LayerType, kind)] for kind in _COMPARED}


@pytest.mark.parametrize(
    ("weight_dtype", "soft_cap"), [("as_stored", 0.0), ("int8", 0.0), ("int4", 0.0), ("fp8", 0.0), ("as_stored", 30.0)]
)
def test_nvidias_parser_makes_the_same_of_a_network(weight_dtype: str, soft_cap: float, tmp_path: Path) -> None:
    options = NetworkOptions("float16", weight_dtype, "float16", "quantize_linear")
    write_network(TinyCheckpoint(_CONFIG), options, tmp_path)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)

    network = with_soft_cap(onnx.load(tmp_path / MODEL_FILE, load_external_data=False), soft_cap)
    lowered = lower_paged_attention(network, 32)
    constants = ConstantReader(lowered, tmp_path)
    ours = builder.create_network(0)
    NetworkEmitter(trt, ours, constants, OPERATORS).emit(lowered.graph)

    theirs = builder.create_network(0)
    parser = trt.OnnxParser(theirs, logger)
    path = tmp_path / "lowered.onnx"
    onnx.save(lowered, path)
    assert parser.parse_from_file(str(path)), [parser.get_error(index).desc() for index in range(parser.num_errors)]

    assert _tensors(ours) == _tensors(theirs)
    assert _layers(ours) == _layers(theirs)
    assert _layers(ours)["ATTENTION_INPUT"] == (0 if soft_cap else _CONFIG.num_hidden_layers)
    assert _layers(ours)["SOFTMAX"] == (_CONFIG.num_hidden_layers if soft_cap else 0)


def test_an_operator_without_a_counterpart_is_named() -> None:
    node = onnx.helper.make_node("Erf", ["x"], ["y"], name="layers.0.gelu")
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], []))
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    emitter = NetworkEmitter(trt, network, ConstantReader(model, Path()), OPERATORS)
    with pytest.raises(TargetError, match=r"node layers\.0\.gelu: operator Erf has no counterpart in TensorRT"):
        emitter.emit(model.graph)


def test_a_layer_that_is_refused_is_named_with_its_node() -> None:
    inputs = [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2]),
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, [2]),
    ]
    node = onnx.helper.make_node("Add", ["x", "y"], ["z"], name="layers.0.sum")
    output = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", inputs, [output]))
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    emitter = NetworkEmitter(trt, builder.create_network(0), ConstantReader(model, Path()), OPERATORS)
    with pytest.raises(TargetError, match=r"layers\.0\.sum"):
        emitter.emit(model.graph)
