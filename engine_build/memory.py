"""What an engine will take in memory, from configuration and checkpoint headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine_build.checkpoint.interface import Checkpoint
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.checkpoint.weight_shapes import Shape, weight_shapes
from engine_build.manifest import BuildConfig
from engine_build.network.options import DTYPES
from engine_build.network.quantization import QUANTIZED_FORMATS, QuantizedFormat
from engine_build.network.weights import GROUP_SIZE
from engine_build.targets.interface import KvCacheType, Target


@dataclass(frozen=True, slots=True)
class KvCacheMemory:
    """Bytes of keys and values over all layers, kept as `dtype`."""

    dtype: str
    bytes_per_token: int
    bytes_per_block: int
    bytes_for_one_sequence: int
    """One request of `max_seq_len` tokens."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes. Weights and KV are exact up to alignment, the workspace is an estimate."""

    weights: int
    workspace: int
    kv_cache: tuple[KvCacheMemory, ...]
    """By the types the target can keep keys and values in, the default first."""


def estimate_memory(checkpoint: Checkpoint, build_config: BuildConfig, target: Target) -> MemoryEstimate:
    """Memory of an engine built from `checkpoint`; no weight is read."""
    config = checkpoint.config
    return MemoryEstimate(
        weights=weight_bytes(checkpoint, build_config, target),
        workspace=workspace_bytes(config, build_config),
        kv_cache=kv_cache_memory(config, build_config, target),
    )


def kv_cache_memory(config: ModelConfig, build_config: BuildConfig, target: Target) -> tuple[KvCacheMemory, ...]:
    """Memory of keys and values by the types the target can keep them in, the default first."""
    return tuple(_kv_cache_memory(config, build_config, type_) for type_ in target.kv_cache_types(build_config))


def weight_bytes(checkpoint: Checkpoint, build_config: BuildConfig, target: Target) -> int:
    """Bytes of the network's constants, of all devices together where there are several."""
    shapes = weight_shapes(checkpoint.config)
    head = "model.embed_tokens.weight" if checkpoint.config.tie_word_embeddings else "lm_head.weight"
    total = checkpoint.config.head_size // 2 * DTYPES["float32"].itemsize  # rotary frequencies
    activation_dtype = target.activation_dtype(build_config.dtype)
    in_groups = target.quantized_as == "groups"
    for parts in _fused(checkpoint.config):
        stays_quantized = in_groups and head not in parts and all(map(checkpoint.is_group_quantized, parts))
        quantized = (in_groups and build_config.weight_dtype == "int8") or stays_quantized
        is_vocabulary = parts[0] in ("model.embed_tokens.weight", "lm_head.weight")
        format_ = None if in_groups or is_vocabulary else QUANTIZED_FORMATS.get(build_config.weight_dtype)
        for name in parts:
            if len(shapes[name]) == 2 and format_ is not None:
                total += _formatted_bytes(shapes[name], format_, activation_dtype)
            else:
                total += _constant_bytes(shapes[name], quantized, build_config.dtype, activation_dtype)
    return total


def _fused(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    """Names of the weights that become one constant: it is in 8-bit groups only if all its parts are."""
    fused = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
    followers = {name for names in fused.values() for name in names[1:]}
    for name in weight_shapes(config):
        module = name.split(".")[-2]
        if module in fused:
            yield tuple(name.replace(module, part) for part in fused[module])
        elif module not in followers:
            yield (name,)


def _formatted_bytes(shape: Shape, format_: QuantizedFormat, factor_dtype: str) -> int:
    rows, columns = shape
    blocks = columns // format_.block_size(columns, "a matrix")
    return rows * columns * format_.bits // 8 + rows * blocks * DTYPES[factor_dtype].itemsize


def _constant_bytes(shape: Shape, quantized: bool, dtype: str, activation_dtype: str) -> int:
    elements = int(np.prod(shape))
    if len(shape) == 1:
        return elements * DTYPES[activation_dtype].itemsize
    if quantized:
        return elements + elements // GROUP_SIZE * DTYPES["float16"].itemsize
    return elements * DTYPES[dtype].itemsize


def workspace_bytes(config: ModelConfig, build_config: BuildConfig) -> int:
    """Values alive at once in the largest step, where most are: in the MLP, or at the logits.

    In the MLP, each of `max_num_tokens` rows has the residual, its norm, gate and up, and their product; at the
    attention, the residual, q, k, v and the output. Then each sampled row has float32 logits.
    """
    query = config.num_attention_heads * config.head_size
    key_value = config.num_key_value_heads * config.head_size
    mlp = 2 * config.hidden_size + 3 * config.intermediate_size
    attention = 2 * config.hidden_size + 2 * (query + 2 * key_value) + query
    rows = build_config.max_num_tokens * max(mlp, attention) * DTYPES[build_config.dtype].itemsize
    logits = build_config.max_batch_size * config.vocab_size * DTYPES["float32"].itemsize
    return rows + logits


def _kv_cache_memory(config: ModelConfig, build_config: BuildConfig, type_: KvCacheType) -> KvCacheMemory:
    bytes_per_row = config.head_size * type_.bytes_per_element + type_.extra_bytes_per_row
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * bytes_per_row
    bytes_per_block = bytes_per_token * build_config.tokens_per_block
    blocks = -(-build_config.max_seq_len // build_config.tokens_per_block)
    return KvCacheMemory(type_.name, bytes_per_token, bytes_per_block, blocks * bytes_per_block)
