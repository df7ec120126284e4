"""What every checkpoint reader offers: the configuration, weights by name, the tokenizer's files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.model_config import ModelConfig


class CheckpointError(Exception):
    """A checkpoint cannot be read: names the file, what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A weight as plain numbers: `float32`, `float16` or `ml_dtypes.bfloat16`, in the checkpoint's own shape."""

    data: NDArray[np.generic]

    def to_float32(self) -> NDArray[np.float32]:
        return self.data.astype(np.float32)


@dataclass(frozen=True, slots=True)
class GroupQuantizedTensor:
    """A matrix in groups of 32 along its last axis: `weight = values * scales` (GGUF Q8_0).

    `values`: int8 `[out, in]`; `scales`: float16 `[out, in // 32]`.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float16]

    def to_float32(self) -> NDArray[np.float32]:
        out, columns = self.values.shape
        groups = self.values.reshape(out, columns // 32, 32).astype(np.float32)
        return (groups * self.scales.astype(np.float32)[:, :, None]).reshape(out, columns)


Tensor = DenseTensor | GroupQuantizedTensor


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What goes into the engine directory's `tokenizer/`: file name -> content, in Hugging Face's formats.

    `tokenizer.json` (readable by the `tokenizers` library), `tokenizer_config.json` (special tokens), and, where the
    checkpoint has one, `chat_template.jinja`.
    """

    files: dict[str, bytes] = field(default_factory=dict)


class Checkpoint(Protocol):
    """Reads lazily: a tensor's bytes are touched when it is asked for.

    Names are Hugging Face's (`model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`, ...,
    `model.norm.weight`, `lm_head.weight` unless tied), with q and k in Hugging Face's rotary order (halves, not
    interleaved pairs) whatever the file's own order is. Linear weights are `[out_features, in_features]`.
    """

    config: ModelConfig
    source: str
    """For people: what was read."""

    def names(self) -> Iterable[str]: ...

    def is_group_quantized(self, name: str) -> bool:
        """Whether `tensor(name)` is a `GroupQuantizedTensor`; its bytes are not touched."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Raises `CheckpointError` naming the tensor when it is missing or of an unsupported type."""
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """Empty when the checkpoint has no tokenizer; raises `CheckpointError` when it has one that cannot be used."""
        ...
