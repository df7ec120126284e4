"""Checkpoint directories of TensorRT-LLM: several ranks are put together to the model they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from engine_build.checkpoint import CheckpointError, RopeScaling, open_checkpoint
from engine_build.checkpoint.model_config import ModelConfig
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import random_weights

_CONFIG = tiny_config(num_hidden_layers=3, tie_word_embeddings=False)
_ROWS = {"mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj"}
_COLUMNS = {"attention.dense": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}


def _write(directory: Path, config: ModelConfig, tp_size: int = 1, pp_size: int = 1, **changes: Any) -> Path:
    """As TensorRT-LLM's converter lays a Llama out."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config, seed=1)
    stages = np.array_split(np.arange(config.num_hidden_layers), pp_size)
    for pp_rank, layers in enumerate(stages):
        for tp_rank in range(tp_size):
            rank = _rank(config, weights, layers.tolist(), tp_rank, tp_size)
            if pp_rank == 0:
                rank["transformer.vocab_embedding.weight"] = weights["model.embed_tokens.weight"]
            if pp_rank == pp_size - 1:
                rank["transformer.ln_f.weight"] = weights["model.norm.weight"]
                head = weights["lm_head.weight"]
                padding = np.zeros((-len(head) % tp_size, head.shape[1]), head.dtype)
                rank["lm_head.weight"] = np.split(np.concatenate([head, padding]), tp_size)[tp_rank]
            contiguous = {name: np.ascontiguousarray(weight) for name, weight in rank.items()}
            save_file(contiguous, directory / f"rank{pp_rank * tp_size + tp_rank}.safetensors")
    content = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_size,
        "hidden_act": "silu",
        "norm_epsilon": config.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.rope_theta,
        "rotary_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    (directory / "config.json").write_text(json.dumps(content | changes))
    return directory


def _rank(
    config: ModelConfig, weights: dict[str, NDArray[np.float32]], layers: list[int], tp_rank: int, tp_size: int
) -> dict[str, NDArray[np.float32]]:
    rank = {}
    for local, layer in enumerate(layers):
        ours, theirs = f"model.layers.{layer}", f"transformer.layers.{local}"
        rank[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.input_layernorm.weight"]
        rank[f"{theirs}.post_layernorm.weight"] = weights[f"{ours}.post_attention_layernorm.weight"]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads["v_proj"] = heads["k_proj"]
        parts = []
        for name, count in heads.items():
            by_head = weights[f"{ours}.self_attn.{name}.weight"].reshape(count, config.head_size, -1)
            by_head = np.repeat(by_head, max(1, tp_size // count), axis=0)
            parts.append(np.split(by_head, tp_size)[tp_rank].reshape(-1, config.hidden_size))
        rank[f"{theirs}.attention.qkv.weight"] = np.concatenate(parts)
        for names, axis in ((_ROWS, 0), (_COLUMNS, 1)):
            for name, source in names.items():
                rank[f"{theirs}.{name}.weight"] = np.split(weights[f"{ours}.{source}.weight"], tp_size, axis)[tp_rank]
    return rank


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
def test_ranks_are_put_together_to_the_model_they_were_made_from(tp_size: int, pp_size: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_write(tmp_path, _CONFIG, tp_size, pp_size))
    expected = random_weights(_CONFIG, seed=1)
    assert set(checkpoint.names()) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), weight, err_msg=name)
    config = checkpoint.config
    assert (config.hidden_size, config.num_key_value_heads, config.head_size) == (64, 2, 16)
    assert not config.tie_word_embeddings


def test_a_vocabulary_filled_up_for_its_ranks_is_cut_again(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=101, tie_word_embeddings=False)
    checkpoint = open_checkpoint(_write(tmp_path, config, tp_size=2))
    head = random_weights(config, seed=1)["lm_head.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").to_float32(), head)


def test_rotary_settings_are_read(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 512}
    config = open_checkpoint(_write(tmp_path, _CONFIG, rotary_scaling=scaling, rotary_base=500_000.0)).config
    assert config.rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 512)
    assert config.rope_theta == 500_000.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "GPTForCausalLM"}, "architecture 'GPTForCausalLM' is not supported; supported are Llama"),
        (
            {"quantization": {"quant_algo": "W4A16_AWQ"}},
            "quant_algo 'W4A16_AWQ' is not read; give the float checkpoint",
        ),
        (
            {"quantization": {"quant_algo": "W8A16"}},
            "quant_algo 'W8A16' is not read: its integers are stored in the order that kernels of one GPU generation",
        ),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ({"mapping": {"world_size": 3, "tp_size": 2}}, "world_size 3 is not tp_size 2 x pp_size 1"),
        ({"mapping": {"tp_size": 2}}, r"lacks rank1\.safetensors: its config\.json says tp_size 2, pp_size 1"),
        (
            {"intermediate_size": 95},
            r"mlp\.gate_proj\.weight has shape \[96, 64\], its configuration calls for \[95, 64\]",
        ),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(_write(tmp_path, _CONFIG, **changes))


def test_a_weight_without_a_place_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, _CONFIG) / "rank0.safetensors"
    weights = load_file(path)
    save_file(weights | {"transformer.layers.0.mlp.router.weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(CheckpointError, match=r"mlp\.router\.weight has no place in a model of the Llama family"):
        open_checkpoint(tmp_path)
    save_file(weights | {"transformer.layers.0.mlp.fc.weights_scaling_factor": np.zeros(1, np.float32)}, path)
    with pytest.raises(CheckpointError, match="belongs to quantized weights, which are not read"):
        open_checkpoint(tmp_path)


def test_a_missing_weight_is_named_with_its_file(tmp_path: Path) -> None:
    path = _write(tmp_path, _CONFIG, tp_size=2) / "rank1.safetensors"
    weights = load_file(path)
    del weights["transformer.layers.2.mlp.proj.weight"]
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"rank1\.safetensors has no weight transformer\.layers\.2\.mlp\.proj"):
        open_checkpoint(tmp_path)


# -- FP8

_AS_IT_IS = np.zeros(0)
_FP8 = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "dtype": "bfloat16"}


def _write_fp8(
    directory: Path, tp_size: int = 1, scale_of_fc: NDArray[Any] | None = _AS_IT_IS
) -> dict[str, NDArray[np.float32]]:
    """As NVIDIA's quantizer writes it: matrices of layers in FP8, a factor for each rank. Gives what the matrices stand
    for, by TensorRT-LLM's names, but not the fused ones. `scale_of_fc` replaces a factor, or takes it away."""
    _write(directory, _CONFIG, tp_size, **_FP8)
    meant: dict[str, list[NDArray[np.float32]]] = {}
    for rank in range(tp_size):
        path = directory / f"rank{rank}.safetensors"
        weights: dict[str, Any] = load_file(path)
        for name in [name for name in weights if weights[name].ndim == 2 and ".layers." in name]:
            scale = np.float32(np.abs(weights[name]).max() / 448)
            values = (weights[name] / scale).astype(ml_dtypes.float8_e4m3fn)
            module = name.removesuffix(".weight")
            weights[name] = values
            weights[f"{module}.weights_scaling_factor"] = np.array([scale])
            weights[f"{module}.activation_scaling_factor"] = np.array([0.5], np.float32)
            meant.setdefault(name, []).append(values.astype(np.float32) * scale)
        for layer in range(_CONFIG.num_hidden_layers):
            weights[f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"] = np.ones(1, np.float32)
        if scale_of_fc is not _AS_IT_IS:
            name = "transformer.layers.0.mlp.fc.weights_scaling_factor"
            del weights[name]
            weights |= {} if scale_of_fc is None else {name: scale_of_fc}
        save_file(weights, path)
    axes = {"attention.dense.weight": 1, "mlp.proj.weight": 1}
    return {
        name: np.concatenate(parts, axis=axes.get(".".join(name.split(".")[-3:]), 0))
        for name, parts in meant.items()
        if not name.endswith("qkv.weight")
    }


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fp8_weights_are_multiplied_by_the_factor_of_their_rank(tp_size: int, tmp_path: Path) -> None:
    meant = _write_fp8(tmp_path, tp_size)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == "bfloat16"
    for theirs, ours in {**_ROWS, **_COLUMNS}.items():
        weight = checkpoint.tensor(f"model.layers.1.{ours}.weight")
        np.testing.assert_array_equal(weight.to_float32(), meant[f"transformer.layers.1.{theirs}.weight"])
    expected = random_weights(_CONFIG, seed=1)
    for name, weight in expected.items():  # q, k and v share a factor
        tolerance = np.abs(weight).max() / 16
        np.testing.assert_allclose(checkpoint.tensor(name).to_float32(), weight, atol=tolerance, err_msg=name)
    head = checkpoint.tensor("lm_head.weight").to_float32()
    np.testing.assert_array_equal(head, expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, "fc.weight is of type F8_E4M3 and has no weights_scaling_factor; FP8 needs one"),
        (np.ones(2, np.float32), r"weights_scaling_factor is F32\[2\]; it must be one number of type F32"),
        (np.ones(1, np.float16), r"weights_scaling_factor is F16\[1\]; it must be one number"),
    ],
)
def test_an_fp8_weight_needs_one_factor(scale: NDArray[Any] | None, said: str, tmp_path: Path) -> None:
    _write_fp8(tmp_path, scale_of_fc=scale)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def test_fp8_weights_of_a_checkpoint_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    _write_fp8(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": {}}))
    with pytest.raises(CheckpointError, match="belongs to quantized weights, which are not read"):
        open_checkpoint(tmp_path)
