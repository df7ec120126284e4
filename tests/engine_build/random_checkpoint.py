"""A checkpoint of any size whose weights are drawn when they are asked for, so that it takes no memory of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from engine_build.checkpoint.interface import DenseTensor, Tensor, TokenizerFiles
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.checkpoint.weight_shapes import weight_shapes

ONE_BILLION = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_size=64,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    dtype="float32",
)
"""The sizes of Llama 3.2 1B with a smaller vocabulary and a head of its own: 1.1 billion parameters."""


class RandomCheckpoint:
    """Implements `engine_build.checkpoint.Checkpoint`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.source = "random weights"
        self._shapes = weight_shapes(config)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def is_group_quantized(self, name: str) -> bool:  # noqa: ARG002, none is
        return False

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return DenseTensor(np.ones(shape, np.float32))
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        return DenseTensor(generator.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5))

    def tokenizer_files(self) -> TokenizerFiles:
        return TokenizerFiles()
