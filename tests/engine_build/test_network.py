"""The network as written: run by onnx's own reference evaluator, it must be the model that transformers knows."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

import engine_build.network
from engine_build.checkpoint.interface import DenseTensor, Tensor
from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from engine_build.network import DATA_FILE, MODEL_FILE, NetworkError, NetworkOptions, PagedAttention, write_network
from engine_build.network.options import DTYPES
from engine_build.network.weights import quantize
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.tiny_engine import transformers_logits, transformers_model

TOKENS_PER_BLOCK = 8
NUM_BLOCKS = 12

CONFIGS = {
    "grouped-query heads, tied": tiny_config(),
    "as many key heads as query heads": tiny_config(num_key_value_heads=4),
    "one key head, untied": tiny_config(num_key_value_heads=1, tie_word_embeddings=False),
    "heads wider than the hidden size": tiny_config(head_size=32),
    "bias": tiny_config(attention_bias=True),
    "linear rope scaling": tiny_config(rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope scaling": tiny_config(
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=32)
    ),
    "sliding window": tiny_config(sliding_window=5),
}


class Evaluated:
    """A written network in the reference evaluator, with caches of its own."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.model = onnx.load(directory / MODEL_FILE)
        self._evaluator = ReferenceEvaluator(self.model, new_ops=[PagedAttention])
        shape = (NUM_BLOCKS, config.num_key_value_heads, TOKENS_PER_BLOCK, config.head_size)
        self._caches = {
            f"{kind}_cache_{layer}": np.zeros(shape, np.float32)
            for layer in range(config.num_hidden_layers)
            for kind in ("key", "value")
        }

    def logits(
        self, token_ids: Iterable[int], table: Iterable[int], *, past: int = 0, sampled: Iterable[int] | None = None
    ) -> NDArray[np.float32]:
        """Feed one sequence's next tokens."""
        ids, blocks = np.array(list(token_ids)), np.array(list(table), np.int32)
        count = len(ids)
        inputs = {
            "input_ids": ids,
            "position_ids": np.arange(past, past + count),
            "past_lens": np.array([past], np.int32),
            "subsequence_begins": np.array([0, count], np.int32),
            "block_indices": blocks,
            "block_indices_begins": np.array([0, len(blocks)], np.int32),
            "max_context_len": np.array(past + count, np.int32),
            "sampled_rows": np.array(range(count) if sampled is None else list(sampled), np.int64),
        }
        (result,) = self._evaluator.run(None, inputs | self._caches)
        logits: NDArray[np.float32] = result
        return logits


def evaluated(checkpoint: TinyCheckpoint, directory: Path, options: NetworkOptions | None = None) -> Evaluated:
    write_network(checkpoint, options or NetworkOptions(), directory)
    return Evaluated(directory, checkpoint.config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_network_is_the_model_that_transformers_knows(config: ModelConfig, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(config, seed=3)
    network = evaluated(checkpoint, tmp_path)
    token_ids = np.random.default_rng(5).integers(0, config.vocab_size, 30).tolist()
    expected = transformers_logits(transformers_model(checkpoint), token_ids)
    in_chunks = np.concatenate(
        [
            network.logits(token_ids[:13], [5, 2]),
            network.logits(token_ids[13:14], [5, 2], past=13),
            network.logits(token_ids[14:], [5, 2, 9, 0], past=14),
        ]
    )
    np.testing.assert_allclose(in_chunks, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_only_sampled_rows_have_logits_and_they_are_those_of_the_full_run(tmp_path: Path) -> None:
    network = evaluated(TinyCheckpoint(), tmp_path)
    token_ids = range(20)
    everything = network.logits(token_ids, [0, 1, 2])
    some = network.logits(token_ids, [3, 4, 5], sampled=[19, 0, 7])
    np.testing.assert_allclose(some, everything[[19, 0, 7]], atol=1e-5)
    assert network.logits(token_ids, [0, 1, 2], sampled=[]).shape == (0, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("typed_throughout", [False, True], ids=["float32 activations", "typed throughout"])
def test_each_dtype_stays_close_to_float32(dtype: str, typed_throughout: bool, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config(attention_bias=True))
    exact = evaluated(checkpoint, tmp_path).logits(range(24), [0, 1, 2])
    options = NetworkOptions(dtype, activation_dtype=dtype if typed_throughout else "float32")
    network = evaluated(checkpoint, tmp_path, options)
    error = np.abs(network.logits(range(24), [0, 1, 2]) - exact).max() / np.abs(exact).max()
    assert error <= {"float32": 0.0, "float16": 0.01, "bfloat16": 0.06}[dtype]
    stored = {tensor.name: tensor.data_type for tensor in network.model.graph.initializer}
    assert stored["layers.0.mlp.down.weight"] == onnx.helper.np_dtype_to_tensor_dtype(DTYPES[dtype])


def test_matrices_in_8_bit_groups_stay_as_they_are_and_fused_ones_lie_row_below_row(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(quantized=True)
    network = evaluated(checkpoint, tmp_path)
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor, str(tmp_path)) for tensor in network.model.graph.initializer
    }
    parts = [checkpoint.tensor(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    np.testing.assert_array_equal(
        constants["layers.1.attention.qkv.weight.values"].reshape(128, 64), np.concatenate([p.values for p in parts])
    )
    np.testing.assert_array_equal(
        constants["layers.1.attention.qkv.weight.scales"].reshape(128, 2), np.concatenate([p.scales for p in parts])
    )
    expected = transformers_logits(transformers_model(checkpoint), range(20))
    np.testing.assert_allclose(network.logits(range(20), [0, 1, 2]), expected, atol=1e-5 * np.abs(expected).max())


def test_fused_parts_of_which_one_is_dense_become_dense(tmp_path: Path) -> None:
    class Mixed(TinyCheckpoint):
        def tensor(self, name: str) -> Tensor:
            tensor = super().tensor(name)
            return DenseTensor(tensor.to_float32()) if name.endswith("v_proj.weight") else tensor

    checkpoint = Mixed(quantized=True)
    network = evaluated(checkpoint, tmp_path)
    names = {tensor.name for tensor in network.model.graph.initializer}
    assert "layers.0.attention.qkv.weight" in names
    assert "layers.0.mlp.gate_up.weight.values" in names
    expected = transformers_logits(transformers_model(checkpoint), range(20))
    np.testing.assert_allclose(network.logits(range(20), [0, 1, 2]), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_8_bit_groups_becomes_dense_so_that_logits_are_not_rounded(tied: bool, tmp_path: Path) -> None:
    class Grouped(TinyCheckpoint):
        def tensor(self, name: str) -> Tensor:
            tensor = super().tensor(name)
            embedding = name == "model.embed_tokens.weight"
            return quantize(tensor.to_float32()) if embedding else tensor

    checkpoint = Grouped(tiny_config(tie_word_embeddings=tied), quantized=True)
    network = evaluated(checkpoint, tmp_path)
    names = {tensor.name for tensor in network.model.graph.initializer}
    assert ("embedding.weight" in names) is tied
    assert ("embedding.weight.values" in names) is not tied
    assert ("head.weight" in names) is not tied
    assert "head.weight.values" not in names
    assert "layers.0.mlp.down.weight.values" in names


@pytest.mark.parametrize("tied", [True, False])
def test_int8_turns_every_matrix_into_groups_embedding_and_head_included(tied: bool, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config(tie_word_embeddings=tied))
    network = evaluated(checkpoint, tmp_path, NetworkOptions(weight_dtype="int8"))
    for tensor in network.model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            assert len(tensor.dims) == 1 or tensor.name == "rope.frequencies"
    exact = transformers_logits(transformers_model(checkpoint), range(20))
    error = np.abs(network.logits(range(20), [0, 1, 2]) - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.1


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
        write_network(TinyCheckpoint(), NetworkOptions("bfloat16"), directory)
    for name in (MODEL_FILE, DATA_FILE):
        first, second = (directory / name for directory in directories)
        assert first.read_bytes() == second.read_bytes()


def test_progress_counts_every_tensor_of_the_checkpoint_once(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint()
    calls: list[tuple[int, int]] = []
    write_network(checkpoint, NetworkOptions(), tmp_path, lambda done, total: calls.append((done, total)))
    total = len(list(checkpoint.names()))
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    class Lazy(TinyCheckpoint):
        """Draws a tensor when it is asked for, and holds none."""

        def __init__(self, config: ModelConfig) -> None:
            self.config, self.source = config, "lazy"
            one_layer = TinyCheckpoint(replace(config, num_hidden_layers=1))
            self._shapes = {name: weight.shape for name, weight in one_layer.state_dict().items()}

        def tensor(self, name: str) -> Tensor:
            return DenseTensor(np.ones(self._shapes[re.sub(r"layers\.\d+", "layers.0", name)], np.float32))

    peaks = []
    for layers in (2, 16):
        config = tiny_config(hidden_size=512, intermediate_size=1024, num_hidden_layers=layers)
        checkpoint = Lazy(config)
        tracemalloc.start()
        write_network(checkpoint, NetworkOptions("float16"), tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    largest_fused_matrix = 2 * 1024 * 512 * 4
    assert peaks[1] < 2 * largest_fused_matrix
    assert peaks[1] - peaks[0] < largest_fused_matrix / 2


def test_the_readme_lists_exactly_the_operators_in_use(tmp_path: Path) -> None:
    write_network(TinyCheckpoint(), NetworkOptions("bfloat16", "int8", "bfloat16"), tmp_path)
    used = {node.op_type for node in onnx.load(tmp_path / MODEL_FILE, load_external_data=False).graph.node}
    readme = (Path(engine_build.network.__file__).parent / "README.md").read_text()
    listed = re.search(r"Opset 23: `([^`]*)`", readme)
    assert listed is not None
    assert used == {*listed[1].split(), "PagedAttention"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(tiny_config(), architecture="GPT2LMHeadModel"), "GPT2LMHeadModel .* LlamaForCausalLM"),
        (replace(tiny_config(), num_key_value_heads=3), "4 attention heads .* 3 key/value heads"),
        (replace(tiny_config(), head_size=15), "head_size 15"),
        (tiny_config(rope_scaling=RopeScaling("yarn", 2.0)), "'yarn' .* linear or llama3"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_name(
    config: ModelConfig, message: str, tmp_path: Path
) -> None:
    checkpoint = TinyCheckpoint()
    checkpoint.config = config
    with pytest.raises(NetworkError, match=message):
        write_network(checkpoint, NetworkOptions(), tmp_path)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NetworkError, match=r"dtype 'fp8' .* float32, float16, bfloat16"):
        NetworkOptions("fp8")
    with pytest.raises(NetworkError, match="activation_dtype 'half'"):
        NetworkOptions(activation_dtype="half")
    with pytest.raises(NetworkError, match=r"weight_dtype 'int3' .* as_stored, int8, int4, fp8"):
        NetworkOptions(weight_dtype="int3")
    with pytest.raises(NetworkError, match="weight_dtype 'int4' cannot be written as groups; as_stored and int8 can"):
        NetworkOptions(weight_dtype="int4")
    with pytest.raises(NetworkError, match=r"quantized_as 'dust' .* groups, quantize_linear"):
        NetworkOptions(quantized_as="dust")


def test_a_matrix_that_does_not_divide_into_groups_is_refused(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config(intermediate_size=100))
    with pytest.raises(NetworkError, match=r"down_proj\.weight: 100 columns .* groups of 32"):
        write_network(checkpoint, NetworkOptions(weight_dtype="int8"), tmp_path)


@pytest.mark.parametrize("options", [NetworkOptions("float16"), NetworkOptions(weight_dtype="int8")])
@pytest.mark.parametrize("value", [1e9, np.nan])
def test_a_weight_that_its_new_type_cannot_hold_is_refused(
    options: NetworkOptions, value: float, tmp_path: Path
) -> None:
    class Broken(TinyCheckpoint):
        def tensor(self, name: str) -> Tensor:
            tensor = super().tensor(name)
            if name == "model.layers.1.mlp.up_proj.weight":
                weights = tensor.to_float32()
                weights[3, 4] = value
                return DenseTensor(weights)
            return tensor

    with pytest.raises(NetworkError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        write_network(Broken(), options, tmp_path)
