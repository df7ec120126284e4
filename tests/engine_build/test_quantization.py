"""Networks whose weights an engine dequantizes: close to the dense network, and as small as they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_build.builder import resolve_build_config
from engine_build.checkpoint.interface import DenseTensor, Tensor
from engine_build.memory import weight_bytes
from engine_build.network import DATA_FILE, MODEL_FILE, NetworkError, NetworkOptions, write_network
from engine_build.network.graph import _ALIGNMENT
from engine_build.network.quantization import QUANTIZED_FORMATS
from engine_build.targets.select import select_target
from tests.engine_build.test_network import evaluated
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_CONFIG = tiny_config(hidden_size=128, intermediate_size=192)


class _Restored(TinyCheckpoint):
    """The checkpoint that a quantized network stands for: every matrix rounded and scaled back."""

    format = QUANTIZED_FORMATS["int8"]

    def tensor(self, name: str) -> Tensor:
        tensor = super().tensor(name)
        if name.endswith("norm.weight") or name == "model.embed_tokens.weight":
            return tensor
        weights = tensor.to_float32()
        factors = self.format.factors(weights, self.format.block_size(weights.shape[1], name), np.dtype(np.float32))
        values = self.format.values(weights, factors).astype(np.float32).reshape(*factors.shape, -1)
        return DenseTensor((values * factors[:, :, None]).reshape(weights.shape))


@pytest.mark.parametrize(("weight_dtype", "error"), [("int8", 1e-5), ("int4", 1e-5), ("fp8", 0.1)])
def test_a_quantized_network_is_the_network_of_its_rounded_weights(
    weight_dtype: str, error: float, tmp_path: Path
) -> None:
    """With fp8, activations are rounded besides."""
    checkpoint = _Restored(_CONFIG, seed=2)
    checkpoint.format = QUANTIZED_FORMATS[weight_dtype]
    options = NetworkOptions(weight_dtype=weight_dtype, quantized_as="quantize_linear")
    tokens = np.random.default_rng(0).integers(0, _CONFIG.vocab_size, 14)
    (tmp_path / "quantized").mkdir()
    quantized = evaluated(TinyCheckpoint(_CONFIG, seed=2), tmp_path / "quantized", options).logits(tokens, [1, 0])
    rounded = evaluated(checkpoint, tmp_path).logits(tokens, [1, 0])
    assert np.linalg.norm(quantized - rounded) < error * np.linalg.norm(rounded)


@given(
    name=st.sampled_from(list(QUANTIZED_FORMATS)),
    seed=st.integers(0, 100),
    scale=st.sampled_from([1e-2, 1.0, 300.0]),
    dtype=st.sampled_from([np.float16, np.float32]),
)
def test_no_weight_is_further_off_than_half_a_step(name: str, seed: int, scale: float, dtype: type) -> None:
    format_ = QUANTIZED_FORMATS[name]
    weights = (np.random.default_rng(seed).standard_normal((4, 128)) * scale).astype(np.float32)
    block_size = format_.block_size(128, "w")
    factors = format_.factors(weights, block_size, np.dtype(dtype))
    values = format_.values(weights, factors).astype(np.float32)
    restored = values.reshape(*factors.shape, block_size) * factors.astype(np.float32)[:, :, None]
    step = np.abs(weights).reshape(*factors.shape, block_size).max(-1, keepdims=True) / format_.largest
    largest_step = 32 * step if name == "fp8" else step  # 448 and 416 are neighbours in fp8
    assert (np.abs(restored.reshape(weights.shape) - weights) <= 0.51 * _spread(largest_step, weights) + 1e-7).all()


def _spread(step: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.broadcast_to(step, (*step.shape[:2], weights.shape[1] // step.shape[1])).reshape(weights.shape)


def test_four_bit_numbers_are_stored_two_to_a_byte(tmp_path: Path) -> None:
    options = NetworkOptions("float16", "int4", "float16", "quantize_linear")
    write_network(TinyCheckpoint(_CONFIG), options, tmp_path)
    tensors = {tensor.name: tensor for tensor in onnx.load(tmp_path / MODEL_FILE).graph.initializer}
    values = tensors["layers.0.mlp.down.weight.values"]
    assert values.data_type == onnx.TensorProto.INT4
    assert len(values.raw_data) == 128 * 192 // 2
    assert list(tensors["layers.0.mlp.down.weight.scales"].dims) == [128, 192 // 64]
    assert list(tensors["layers.0.mlp.gate_up.weight.scales"].dims) == [384, 1]


@pytest.mark.parametrize("weight_dtype", ["as_stored", "int8", "int4", "fp8"])
def test_the_memory_estimate_is_what_is_written(weight_dtype: str, tmp_path: Path) -> None:
    checkpoint, target = TinyCheckpoint(_CONFIG, quantized=True), select_target("tensorrt-rtx")
    build_config = resolve_build_config(checkpoint.config, target, weight_dtype=weight_dtype)
    options = NetworkOptions(build_config.dtype, weight_dtype, build_config.dtype, "quantize_linear")
    write_network(checkpoint, options, tmp_path)
    external = [
        tensor
        for tensor in onnx.load(tmp_path / MODEL_FILE, load_external_data=False).graph.initializer
        if tensor.external_data
    ]
    estimated = weight_bytes(checkpoint, build_config, target)
    written = (tmp_path / DATA_FILE).stat().st_size
    assert estimated <= written < estimated + _ALIGNMENT * len(external)


def test_rows_that_make_no_whole_groups_are_refused(tmp_path: Path) -> None:
    options = NetworkOptions(weight_dtype="int4", quantized_as="quantize_linear")
    with pytest.raises(NetworkError, match=r"down_proj\.weight: 96 columns do not make groups of 128 or 64.* int8 is"):
        write_network(TinyCheckpoint(), options, tmp_path)
