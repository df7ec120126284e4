"""GGUF files: weights in Hugging Face's order, every type against an independent decoder, bad files in one line."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgmlType
from transformers.integrations.gguf.dequant import dequantize as transformers_dequantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from engine_build.checkpoint import CheckpointError, GroupQuantizedTensor, RopeScaling, open_checkpoint
from engine_build.checkpoint.gguf_checkpoint import halves_from_pairs
from engine_build.checkpoint.gguf_rope import llama3_divisors
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import SMALL, permuted, quantized, random_weights, write_gguf

_KEY_NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("type_", [GgmlType.F32, GgmlType.F16, GgmlType.BF16])
def test_float_weights_come_back_as_stored_with_q_and_k_in_hugging_face_order(tmp_path: Path, type_: GgmlType) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", SMALL, type_))
    names = {GgmlType.F32: "float32", GgmlType.F16: "float16", GgmlType.BF16: "bfloat16"}
    assert checkpoint.config.dtype == names[type_]
    for name, weight in random_weights(SMALL).items():
        expected = torch.from_numpy(weight)
        if weight.ndim == 2:
            expected = expected.to(getattr(torch, names[type_])).float()
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), expected.numpy(), err_msg=name)


@pytest.mark.parametrize("type_", [GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q6_K])
def test_quantized_weights_equal_what_transformers_decodes(tmp_path: Path, type_: GgmlType) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", SMALL, type_))
    for name, weight in random_weights(SMALL).items():
        if weight.ndim == 1:
            continue
        stored = torch.from_numpy(quantized(permuted(SMALL, name, weight), type_))
        decoded = transformers_dequantize(stored, int(type_)).reshape(weight.shape).numpy()
        tensor = checkpoint.tensor(name)
        found = permuted(SMALL, name, tensor.to_float32())
        np.testing.assert_array_equal(found, decoded, err_msg=name)
        assert np.ptp(found) > 0
        assert isinstance(tensor, GroupQuantizedTensor) is (type_ is GgmlType.Q8_0)
        assert checkpoint.is_group_quantized(name) is (type_ is GgmlType.Q8_0)


def test_8_bit_groups_keep_their_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", SMALL, GgmlType.Q8_0))
    weight = random_weights(SMALL)["model.layers.0.mlp.up_proj.weight"]
    tensor = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert isinstance(tensor, GroupQuantizedTensor)
    groups = quantized(weight, GgmlType.Q8_0).reshape(weight.shape[0], -1, 34)
    np.testing.assert_array_equal(tensor.scales.view(np.uint8).reshape(weight.shape[0], -1, 2), groups[:, :, :2])
    np.testing.assert_array_equal(tensor.values.view(np.uint8).reshape(weight.shape[0], -1, 32), groups[:, :, 2:])


def test_rows_that_rotate_together_end_up_half_a_head_apart() -> None:
    stored = ["a0", "b0", "a1", "b1", "A0", "B0", "A1", "B1"]
    order = halves_from_pairs(num_heads=2, head_size=4)
    assert [stored[row] for row in order] == ["a0", "a1", "b0", "b1", "A0", "A1", "B0", "B1"]


def test_the_configuration_is_the_one_written(tmp_path: Path) -> None:
    expected = replace(SMALL, norm_epsilon=float(np.float32(SMALL.norm_epsilon)))
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", SMALL)).config == expected


def test_an_untied_head_and_biases_are_found(tmp_path: Path) -> None:
    config = replace(SMALL, tie_word_embeddings=False, attention_bias=True)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config))
    weights = random_weights(config)
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.o_proj.bias"):
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), weights[name])


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL)
    assert open_checkpoint(tmp_path).source == str(path)
    write_gguf(tmp_path / "n.gguf", SMALL)
    with pytest.raises(CheckpointError, match=r"several GGUF files, give one of them: m\.gguf, n\.gguf"):
        open_checkpoint(tmp_path)


def test_an_end_of_turn_token_is_an_end_token_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL, extra=lambda writer: writer.add_eot_token_id(7))
    assert open_checkpoint(path).config.eos_token_ids == (2, 7)


def test_linear_scaling_is_read_from_metadata(tmp_path: Path) -> None:
    def add_scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = write_gguf(tmp_path / "m.gguf", SMALL, extra=add_scaling)
    assert open_checkpoint(path).config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recognised_from_its_divisors(tmp_path: Path, factor: float) -> None:
    """Llama 3.1 (factor 8) and 3.2 (32) come with a tensor of divisors instead of parameters."""
    config = replace(SMALL, rope_theta=500_000.0)
    scaling = RopeScaling("llama3", factor)
    divisors = llama3_divisors(scaling, config.rope_theta, config.head_size).astype(np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", config, extra=lambda writer: writer.add_tensor("rope_freqs.weight", divisors)
    )
    assert open_checkpoint(path).config.rope_scaling == scaling


def test_llama_3_divisors_are_those_of_transformers() -> None:
    scaling = RopeScaling("llama3", 8.0)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, head_dim=128, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(llama3_divisors(scaling, 500_000.0, 128), plain / scaled.numpy(), rtol=1e-5)


def test_other_divisors_are_refused_rather_than_approximated(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, SMALL.head_size // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", SMALL, extra=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    with pytest.raises(CheckpointError, match="does not hold Llama 3's rotary scaling"):
        open_checkpoint(path)


def _written_with(**changes: Any) -> Any:
    def write(path: Path) -> None:
        write_gguf(path, SMALL, extra=lambda writer: [getattr(writer, name)(value) for name, value in changes.items()])

    return write


def _unsupported_type(path: Path) -> None:
    write_gguf(path, SMALL, GgmlType.Q5_0)


def _without_a_weight(path: Path) -> None:
    weights = random_weights(SMALL)
    del weights["model.layers.0.mlp.down_proj.weight"]
    write_gguf(path, SMALL, weights=weights)


def _wrong_shape(path: Path) -> None:
    weights = random_weights(SMALL)
    weights[_KEY_NAME] = weights[_KEY_NAME][:64]
    write_gguf(path, SMALL, weights=weights)


def _unknown_weight(path: Path) -> None:
    write_gguf(path, SMALL, extra=lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(64, np.float32)))


def _yarn(path: Path) -> None:
    write_gguf(path, SMALL, extra=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))


def _other_architecture(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_unsupported_type, "is of type Q5_0; supported for a matrix are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K"),
        (_without_a_weight, "missing weight model.layers.0.mlp.down_proj.weight"),
        (_wrong_shape, "k_proj.weight has shape [64, 256], its configuration calls for [128, 256]"),
        (_unknown_weight, "LlamaForCausalLM has no weight blk.0.attn_q_norm.weight"),
        (_yarn, "rotary scaling 'yarn' is not supported"),
        (_other_architecture, "is of architecture 'mamba'; supported is 'llama'"),
        (_written_with(add_expert_count=8), "is a mixture of experts"),
        (_written_with(add_key_length=32), "only heads where all three are equal are supported"),
        (_written_with(add_vocab_size=100), "has shape [128, 256], its configuration calls for [100, 256]"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_in_one_line(tmp_path: Path, write: Any, said: str) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_config()))
    with pytest.raises(CheckpointError, match=r"has no weight lm_head\.weight"):
        checkpoint.tensor("lm_head.weight")


def test_another_process_opens_the_file_again_instead_of_getting_its_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", SMALL))
    sent = pickle.dumps(checkpoint)
    assert len(sent) < 1000
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(pickle.loads(sent).tensor(name).data, checkpoint.tensor(name).data)
