"""What a checkpoint says about the network, in one shape for every checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequency scaling.

    `kind` is `"linear"` (every frequency divided by `factor`) or `"llama3"` (frequencies below the low band divided,
    between the bands interpolated; Llama 3.1). The last three fields belong to `"llama3"`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Sizes are in elements."""

    architecture: str
    """Hugging Face class name: `LlamaForCausalLM` or `MistralForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None = None
    """Positions a token attends to, or `None` for all of them."""
    attention_bias: bool = False
    """Whether q, k, v (and o) projections have a bias."""
    dtype: str = "float32"
    """Dtype the checkpoint stores most weights in: `float32`, `float16`, `bfloat16`."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
