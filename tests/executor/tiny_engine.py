"""A reference engine over a tiny random network, and the transformers model with the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.network import MODEL_FILE, NetworkOptions, write_network
from executor.engines.interface import EngineSpec
from executor.engines.reference import KV_CACHE_DTYPES, ReferenceEngine
from executor.engines.reference_kv_cache import block_shape
from tests.engine_build.tiny_checkpoint import TinyCheckpoint

torch.set_num_threads(1)
"""Tensors here are so small that handing work to a second thread takes ten times longer than doing it."""


def write_tiny_network(checkpoint: TinyCheckpoint, directory: Path, dtype: str = "float32") -> Path:
    """Write the checkpoint's network and return the path of its model file."""
    write_network(checkpoint, NetworkOptions(dtype=dtype), directory)
    return directory / MODEL_FILE


def engine_spec(config: ModelConfig, *, tokens_per_block: int = 4, kv_cache_dtype: str = "float32") -> EngineSpec:
    """Limits large enough for any test, for blocks of the given size."""
    dtype = KV_CACHE_DTYPES[kv_cache_dtype]
    shape = block_shape(config.num_key_value_heads, tokens_per_block, config.head_size, dtype)
    return EngineSpec(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        tokens_per_block=tokens_per_block,
        max_batch_size=16,
        max_num_tokens=512,
        max_input_len=256,
        max_seq_len=256,
        kv_bytes_per_block=2 * config.num_hidden_layers * math.prod(shape) * dtype.itemsize,
    )


def reference_engine(
    model_path: Path,
    config: ModelConfig,
    *,
    num_blocks: int = 64,
    tokens_per_block: int = 4,
    kv_cache_dtype: str = "float32",
) -> ReferenceEngine:
    spec = engine_spec(config, tokens_per_block=tokens_per_block, kv_cache_dtype=kv_cache_dtype)
    return ReferenceEngine(model_path, spec, num_blocks, kv_cache_dtype=kv_cache_dtype)


def transformers_model(checkpoint: TinyCheckpoint) -> PreTrainedModel:
    """transformers' own implementation in float32, with the checkpoint's weights."""
    config = checkpoint.config
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": _rope_parameters(config),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_implementation": "eager",
    }
    model: PreTrainedModel
    if config.architecture == "MistralForCausalLM":
        model = MistralForCausalLM(MistralConfig(**shared, sliding_window=config.sliding_window))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared, attention_bias=config.attention_bias))
    weights = {name: torch.from_numpy(weight) for name, weight in checkpoint.state_dict().items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.eval()


def transformers_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits `[len(token_ids), vocab_size]` of one sequence, in one forward pass."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def _rope_parameters(config: ModelConfig) -> dict[str, object]:
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            parameters |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    return parameters
