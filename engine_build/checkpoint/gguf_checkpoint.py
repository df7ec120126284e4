"""A GGUF file of the `llama` architecture as a `Checkpoint`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.config_check import check_config
from engine_build.checkpoint.gguf_file import GgufFile
from engine_build.checkpoint.gguf_rope import rope_scaling
from engine_build.checkpoint.gguf_tensors import (
    FLOAT_TYPES,
    SUPPORTED_TYPES,
    decode,
    float_type_name,
    is_group_quantized,
)
from engine_build.checkpoint.gguf_tokenizer import tokenizer_files
from engine_build.checkpoint.interface import CheckpointError, Tensor, TokenizerFiles
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.checkpoint.weight_shapes import check_weights, weight_shapes

_MODULE_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_ARCHITECTURE = "llama"


class GgufCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Read the metadata and check that every weight is there, of the right shape and of a supported type.

        Raises:
            CheckpointError: the file is damaged, of another architecture, or uses what the network cannot do.
        """
        self.source = str(path)
        self._file = GgufFile(path)
        _check_types(self._file)
        self.config = _model_config(self._file)
        check_config(self.config, self.source)
        self._stored_names = {hugging_face_name(name): name for name in self._file.tensors if name != _ROPE_DIVISORS}
        check_weights(
            self.config,
            {name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()},
            self.source,
        )

    def __reduce__(self) -> tuple[type[GgufCheckpoint], tuple[Path]]:
        """For another process: it maps the file itself instead of being sent its bytes."""
        return GgufCheckpoint, (Path(self.source),)

    def names(self) -> Iterable[str]:
        return weight_shapes(self.config).keys()

    def is_group_quantized(self, name: str) -> bool:
        info = self._file.tensors[self._stored_name(name)]
        return is_group_quantized(info.type, info.shape)

    def tensor(self, name: str) -> Tensor:
        stored_name = self._stored_name(name)
        info = self._file.tensors[stored_name]
        rows = self._file.rows(stored_name)
        heads = self._rotary_heads(name)
        if heads is None:
            return decode(rows, info.type, info.shape)
        rows = rows.reshape(info.shape[0], -1)  # a bias, one row so far, is permuted element by element
        return decode(rows[halves_from_pairs(heads, self.config.head_size)], info.type, info.shape)

    def tokenizer_files(self) -> TokenizerFiles:
        return tokenizer_files(self._file)

    def _stored_name(self, name: str) -> str:
        if name not in self._stored_names:
            raise CheckpointError(f"{self.source} has no weight {name}")
        return self._stored_names[name]

    def _rotary_heads(self, name: str) -> int | None:
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if ".k_proj." in name else None


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, module, kind] if module in _MODULE_NAMES:
            return f"model.layers.{layer}.{_MODULE_NAMES[module]}.{kind}"
    return name


def halves_from_pairs(num_heads: int, head_size: int) -> NDArray[np.int64]:
    """Row order that turns GGUF's q and k into Hugging Face's.

    GGUF keeps the two rows that rotate together next to each other, Hugging Face half a head apart:

        stored      a0 b0 a1 b1 a2 b2 ..
        returned    a0 a1 a2 .. b0 b1 b2 ..

    Returns:
        `[num_heads * head_size]` int64: `stored[order]` is in Hugging Face's order.
    """
    order = np.arange(num_heads * head_size, dtype=np.int64)
    return order.reshape(num_heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def _check_types(file: GgufFile) -> None:
    for name, info in file.tensors.items():
        supported = SUPPORTED_TYPES if len(info.shape) > 1 else FLOAT_TYPES
        if info.type not in supported:
            raise CheckpointError(
                f"{file.path}: tensor {name} is of type {info.type.name}; supported for a "
                f"{'matrix' if len(info.shape) > 1 else 'vector'} are {', '.join(type_.name for type_ in supported)}"
            )


def _model_config(file: GgufFile) -> ModelConfig:
    architecture = file.string("general.architecture")
    if architecture != _ARCHITECTURE:
        raise CheckpointError(
            f"{file.path} is of architecture {architecture!r}; supported is {_ARCHITECTURE!r} "
            "(Llama 2 and 3, Mistral, SmolLM2)"
        )
    if file.integer("llama.expert_count", 0):
        raise CheckpointError(f"{file.path} is a mixture of experts, which is not supported")
    hidden_size = file.integer("llama.embedding_length")
    num_attention_heads = file.integer("llama.attention.head_count")
    head_size = _head_size(file, hidden_size, num_attention_heads)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: missing weight token_embd.weight")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=file.integer("llama.vocab_size", embedding.shape[0]),
        hidden_size=hidden_size,
        intermediate_size=file.integer("llama.feed_forward_length"),
        num_hidden_layers=file.integer("llama.block_count"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=file.integer("llama.attention.head_count_kv", num_attention_heads),
        head_size=head_size,
        norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number("llama.rope.freq_base", 10_000.0),
        rope_scaling=rope_scaling(file, _ROPE_DIVISORS, head_size),
        max_position_embeddings=file.integer("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_window=file.optional_integer("llama.attention.sliding_window"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        dtype=_dominant_float_type(file),
        bos_token_id=file.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_token_ids(file),
        pad_token_id=file.optional_integer("tokenizer.ggml.padding_token_id"),
    )


def _head_size(file: GgufFile, hidden_size: int, num_attention_heads: int) -> int:
    if num_attention_heads <= 0:
        raise CheckpointError(f"{file.path}: llama.attention.head_count is {num_attention_heads}, it must be positive")
    rotated = file.integer("llama.rope.dimension_count", hidden_size // num_attention_heads)
    head_size = file.integer("llama.attention.key_length", rotated)
    value_size = file.integer("llama.attention.value_length", head_size)
    if rotated != head_size or value_size != head_size:
        raise CheckpointError(
            f"{file.path}: heads with {head_size} key, {value_size} value and {rotated} rotated elements; "
            "only heads where all three are equal are supported"
        )
    return head_size


def _end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The end of the sequence and, where the file names another, of a turn of a chat."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = (file.optional_integer(key) for key in keys)
    return tuple(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _dominant_float_type(file: GgufFile) -> str:
    """The type most weights are stored in; a quantized weight counts as `float32`, which it is read as."""
    num_bytes: Counter[str] = Counter()
    for info in file.tensors.values():
        num_bytes[float_type_name(info.type) or "float32"] += int(np.prod(info.shape))
    return num_bytes.most_common(1)[0][0]
