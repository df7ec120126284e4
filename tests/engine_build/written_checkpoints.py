"""Small checkpoints on disk, in both formats, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.checkpoint.weight_shapes import weight_shapes
from tests.engine_build.tiny_checkpoint import tiny_config

SMALL = tiny_config(hidden_size=256, head_size=64, intermediate_size=512, num_hidden_layers=1)
"""Rows of a multiple of 256, as the K types need them."""

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa"]
MERGES = ["a b", "Ġ a"]

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Hugging Face name -> weight."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in weight_shapes(config).items()}


def hugging_face_json(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a Hugging Face directory, in the spelling before transformers 5."""
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def write_hugging_face(directory: Path, config: ModelConfig, *, shards: int = 1, seed: int = 0) -> Path:
    """A Hugging Face directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hugging_face_json(config)))
    weights = {name: weight.astype(config.dtype) for name, weight in random_weights(config, seed).items()}
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    shard_of = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(weights)}
    for shard in set(shard_of.values()):
        save_file({name: weights[name] for name in weights if shard_of[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return directory


def write_gguf(
    path: Path,
    config: ModelConfig,
    matrix_type: GgmlType = GgmlType.F32,
    *,
    seed: int = 0,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    weights: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """A GGUF file with a tokenizer of a few tokens; `extra` may add to it before it is written."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if extra is not None:
        extra(writer)
    for name, weight in (weights or random_weights(config, seed)).items():
        stored = permuted(config, name, weight)
        type_ = matrix_type if weight.ndim == 2 else GgmlType.F32
        writer.add_tensor(gguf_name(name), quantized(stored, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """Hugging Face name -> GGUF name."""
    module, _, kind = name.rpartition(".")
    if module in _GGUF_NAMES:
        return f"{_GGUF_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def permuted(config: ModelConfig, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of q and k in GGUF's order, the two that rotate together side by side."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return weight
    heads = weight.reshape(-1, config.head_size, *weight.shape[1:])
    half = config.head_size // 2
    result = np.empty_like(heads)
    for pair in range(half):
        result[:, 2 * pair] = heads[:, pair]
        result[:, 2 * pair + 1] = heads[:, pair + half]
    return result.reshape(weight.shape)


def quantized(weight: NDArray[np.float32], type_: GgmlType) -> NDArray[Any]:
    """Stored bytes of a type; for the K types, which the package cannot write, random ones with sane scales."""
    if type_ not in (GgmlType.Q4_K, GgmlType.Q6_K):
        return np.asarray(gguf.quants.quantize(weight, type_))
    elements, block_bytes = GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng(weight.size)
    blocks = generator.integers(0, 256, (weight.shape[0], weight.shape[1] // elements, block_bytes), dtype=np.uint8)
    scales = np.asarray([0.01, 0.02], np.float16).view(np.uint8)
    if type_ is GgmlType.Q4_K:  # scale and minimum come first
        blocks[:, :, :4] = scales
    else:  # the scale comes last
        blocks[:, :, -2:] = scales[:2]
    return blocks.reshape(weight.shape[0], -1)
