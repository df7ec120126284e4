"""A small random Llama held in memory: what the tests build networks from."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.interface import (
    CheckpointError,
    DenseTensor,
    GroupQuantizedTensor,
    Tensor,
    TokenizerFiles,
)
from engine_build.checkpoint.model_config import ModelConfig, RopeScaling

_STORED_AS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(
    *,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_size: int = 16,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    vocab_size: int = 128,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    tie_word_embeddings: bool = True,
    sliding_window: int | None = None,
    attention_bias: bool = False,
    dtype: str = "float32",
    max_position_embeddings: int = 1024,
) -> ModelConfig:
    """The configuration of a Llama of about 80,000 parameters."""
    return ModelConfig(
        architecture="LlamaForCausalLM" if sliding_window is None else "MistralForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_size=head_size,
        norm_epsilon=1e-5,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        sliding_window=sliding_window,
        attention_bias=attention_bias,
        dtype=dtype,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


class TinyCheckpoint:
    """Implements `engine_build.checkpoint.Checkpoint` with weights drawn from a seed.

    Weights are large enough for attention to matter: a wrong mask, position or block changes the logits plainly.
    With `quantized=True` every matrix but the embedding is a `GroupQuantizedTensor`.
    """

    def __init__(self, config: ModelConfig | None = None, *, seed: int = 0, quantized: bool = False) -> None:
        self.config = tiny_config() if config is None else config
        self.source = f"random weights, seed {seed}"
        generator = np.random.default_rng(seed)
        self._tensors = {
            name: self._draw(generator, name, shape, quantized) for name, shape in _weight_shapes(self.config)
        }

    def _draw(self, generator: np.random.Generator, name: str, shape: tuple[int, ...], quantized: bool) -> Tensor:
        if len(shape) == 1:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            return DenseTensor((mean + 0.2 * generator.standard_normal(shape)).astype(self._dtype))
        if quantized and name != "model.embed_tokens.weight":
            scales = generator.uniform(0.5, 1.5, (shape[0], shape[1] // 32)) * (2.0 / (127 * shape[1] ** 0.5))
            values = generator.integers(-127, 128, shape, dtype=np.int8)
            return GroupQuantizedTensor(values, scales.astype(np.float16))
        return DenseTensor((generator.standard_normal(shape) * 1.5 / shape[1] ** 0.5).astype(self._dtype))

    @property
    def _dtype(self) -> type[np.generic]:
        return _STORED_AS[self.config.dtype]

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def is_group_quantized(self, name: str) -> bool:
        return isinstance(self.tensor(name), GroupQuantizedTensor)

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} has no tensor {name}")
        return self._tensors[name]

    def tokenizer_files(self) -> TokenizerFiles:
        return TokenizerFiles()

    def state_dict(self) -> dict[str, NDArray[np.float32]]:
        """Every weight as float32 by its Hugging Face name."""
        return {name: tensor.to_float32() for name, tensor in self._tensors.items()}


def _weight_shapes(config: ModelConfig) -> Iterable[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for projection, shape in (
            ("q_proj", (query, hidden)),
            ("k_proj", (key, hidden)),
            ("v_proj", (key, hidden)),
            ("o_proj", (hidden, query)),
        ):
            yield f"{prefix}.self_attn.{projection}.weight", shape
            if config.attention_bias:
                yield f"{prefix}.self_attn.{projection}.bias", shape[:1]
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
