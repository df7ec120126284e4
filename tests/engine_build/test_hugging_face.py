"""Hugging Face directories: what is read is what was saved, and what is wrong is said in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from engine_build.checkpoint import CheckpointError, DenseTensor, RopeScaling, open_checkpoint
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import hugging_face_json, random_weights, write_hugging_face

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "DELETE"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_is_read_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    expected = {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert set(checkpoint.names()) == set(expected)
    for name, weight in expected.items():
        tensor = checkpoint.tensor(name)
        assert isinstance(tensor, DenseTensor)
        assert tensor.data.dtype.name == str(dtype).removeprefix("torch.")
        assert not checkpoint.is_group_quantized(name)
        np.testing.assert_array_equal(tensor.to_float32(), weight.float().numpy())
    assert checkpoint.config.tie_word_embeddings is tied
    assert checkpoint.config.dtype == str(dtype).removeprefix("torch.")


def test_shards_written_by_transformers_make_one_checkpoint(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in model.state_dict().items():
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), weight.numpy())


def test_mistral_keeps_its_sliding_window_and_end_token(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=7, eos_token_id=5)).save_pretrained(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert config.architecture == "MistralForCausalLM"
    assert config.sliding_window == 7
    assert config.eos_token_ids == (5,)


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "bos_token_id": 9}')
    config = open_checkpoint(tmp_path).config
    assert config.eos_token_ids == (3, 4)
    assert config.bos_token_id == 9


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500_000.0, "rope_scaling": _LLAMA3},
        {"rope_theta": "DELETE", "rope_parameters": {**_LLAMA3, "rope_theta": 500_000.0}},
    ],
)
def test_llama_3_scaling_is_read_in_both_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    write_hugging_face(tmp_path, tiny_config())
    _rewrite_config(tmp_path, **spelling)
    config = open_checkpoint(tmp_path).config
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling_is_read_under_both_keys(tmp_path: Path, key: str) -> None:
    write_hugging_face(tmp_path, tiny_config())
    _rewrite_config(tmp_path, rope_scaling={key: "linear", "factor": 4})
    assert open_checkpoint(tmp_path).config.rope_scaling == RopeScaling("linear", 4.0)


def test_rotary_frequencies_and_a_second_copy_of_a_tied_head_are_left_out(tmp_path: Path) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config)
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in set(open_checkpoint(tmp_path).names())


def test_biases_are_read_when_the_configuration_has_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hugging_face(tmp_path, tiny_config(attention_bias=True)))
    assert checkpoint.tensor("model.layers.0.self_attn.o_proj.bias").to_float32().shape == (64,)


def test_a_directory_without_a_tokenizer_has_no_tokenizer_files(tmp_path: Path) -> None:
    assert open_checkpoint(write_hugging_face(tmp_path, tiny_config())).tokenizer_files().files == {}


def _missing_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _broken_json(directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": [')


def _truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _not_safetensors(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"PK\x03\x04 certainly not")


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _pickled_weights(directory: Path) -> None:
    _no_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")


def _without(name: str) -> dict[str, Any]:
    return {weight: data for weight, data in random_weights(tiny_config()).items() if weight != name}


def _missing_weight(directory: Path) -> None:
    save_file(_without("model.layers.1.mlp.up_proj.weight"), directory / "model.safetensors")


def _wrong_shape(directory: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**_without(name), name: np.zeros((3, 64), np.float32)}, directory / "model.safetensors")


def _unknown_weight(directory: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": np.zeros(16, np.float32)}
    save_file({**_without(""), **extra}, directory / "model.safetensors")


def _integer_weights(directory: Path) -> None:
    weights = {name: np.zeros(weight.shape, np.int8) for name, weight in _without("").items()}
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_missing_config, "has no config.json"),
        (_broken_json, "config.json is not valid JSON"),
        (_truncated, "model.safetensors is truncated or not a safetensors file"),
        (_not_safetensors, "model.safetensors is truncated or not a safetensors file"),
        (_no_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (_pickled_weights, "only pickled weights"),
        (_missing_weight, "missing weight model.layers.1.mlp.up_proj.weight"),
        (_wrong_shape, "k_proj.weight has shape [3, 64], its configuration calls for [32, 64]"),
        (_unknown_weight, "LlamaForCausalLM has no weight model.layers.0.self_attn.q_norm.weight"),
        (_integer_weights, "is of type I8; supported are F32, F16, BF16"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(tmp_path: Path, damage: Any, said: str) -> None:
    damage(write_hugging_face(tmp_path, tiny_config()))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": "DELETE"}, "no 'architectures'"),
        ({"hidden_size": "DELETE"}, "has no field 'hidden_size', which must be an integer"),
        ({"hidden_size": "wide"}, "'hidden_size' is \"wide\", it must be an integer"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is true, it must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, it must be positive"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, with"),
        ({"rms_norm_eps": math.nan}, "norm_epsilon is nan, it must be positive and finite"),
        ({"rope_theta": math.inf}, "rope_theta is inf, it must be positive and finite"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "rope scaling factor is nan"),
        ({"rms_norm_eps": -1e-5}, "norm_epsilon is -1e-05, it must be positive"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', only 'silu' is supported"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"eos_token_id": 4096}, "outside the vocabulary of 128"),
        ({"eos_token_id": ["x"]}, "it must be an integer or a list of integers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no field 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0.0 must be positive"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantized by 'awq' are not supported"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_hugging_face(tmp_path, tiny_config())
    _rewrite_config(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)


def test_an_index_must_name_shards_that_are_there(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, tiny_config(), shards=3)
    assert open_checkpoint(tmp_path).tensor("model.norm.weight").to_float32().shape == (64,)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard model-00002-of-00003\.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_must_name_weights_that_are_in_their_shard(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, tiny_config(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="lacks the weight"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, tiny_config())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        open_checkpoint(tmp_path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_the_written_configuration_is_what_the_tests_think_it_is(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, sliding_window=16)
    write_hugging_face(tmp_path, config)
    assert hugging_face_json(config)["sliding_window"] == 16
    assert open_checkpoint(tmp_path).config == config
