"""A checkpoint directory of TensorRT-LLM (config.json, rank0.safetensors, ...) as a `Checkpoint`.

```
rank = pp_rank * tp_size + tp_rank; layers are numbered from 0 in each stage

transformer.layers.N.attention.qkv     q, k and v of this rank, rows below rows
transformer.layers.N.attention.dense   columns of this rank
transformer.layers.N.mlp.fc            Hugging Face's gate_proj: the activated half
transformer.layers.N.mlp.gate          Hugging Face's up_proj
transformer.layers.N.mlp.proj          down_proj, columns of this rank
transformer.vocab_embedding, ln_f, lm_head (rows of this rank)
```

With quant_algo FP8 a weight is FP8 and has a factor for each rank: weight * weights_scaling_factor. Weights are
multiplied out; how activations and the KV cache were scaled in calibration is not used: what is quantized here has
scales of its own.

Ranks are put together again, so that a build may divide the model otherwise. Source of names and layout: TensorRT-LLM's
documentation of its checkpoint format, and its converter for the Llama family.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.config_check import check_config
from engine_build.checkpoint.hugging_face_tokenizer import tokenizer_files
from engine_build.checkpoint.interface import CheckpointError, DenseTensor, Tensor, TokenizerFiles
from engine_build.checkpoint.json_file import JsonObject
from engine_build.checkpoint.safetensors_file import (
    DTYPES,
    FP8,
    StoredTensor,
    check_dtypes,
    dominant_dtype,
    read_headers,
)
from engine_build.checkpoint.tensorrt_llm_config import FP8_ALGORITHM, Layout, quantization, read_config
from engine_build.checkpoint.weight_shapes import check_weights, weight_shapes

_NAMES = {
    "model.embed_tokens": ("transformer.vocab_embedding", None),
    "model.norm": ("transformer.ln_f", None),
    "lm_head": ("lm_head", 0),
    "input_layernorm": ("input_layernorm", None),
    "post_attention_layernorm": ("post_layernorm", None),
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 0),
    "self_attn.v_proj": ("attention.qkv", 0),
    "self_attn.o_proj": ("attention.dense", 1),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}
"""Hugging Face module -> TensorRT-LLM's, and the axis along which ranks share it; `None` where all have it whole."""

_WEIGHT_SCALE = "weights_scaling_factor"
_UNUSED_SCALES = (".activation_scaling_factor", ".kv_cache_scaling_factor")
_OTHER_SCALES = ("_scaling_factor", "_scaling_factor_2", "per_channel_scale", "_scale", "weights_zero_point")


class _Source(NamedTuple):
    """Where a weight of the whole model comes from."""

    parts: list[StoredTensor]
    """Of each rank of its stage."""
    axis: int | None
    scales: list[StoredTensor | None]
    """Of each part that is FP8, its factor `[1]`."""


def is_tensorrt_llm_directory(directory: Path) -> bool:
    """Whether the weights of a rank are there."""
    return (directory / "rank0.safetensors").is_file()


class TensorRtLlmCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        """Read configuration and weight headers; no weight is loaded.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, or the model is one that is not supported.
        """
        self.source = str(directory)
        self._directory = directory
        config_file = JsonObject.read(directory / "config.json")
        layout = Layout.read(config_file)
        ranks = [read_headers(_rank_path(directory, rank, layout)) for rank in range(layout.num_ranks)]
        stored = [tensor for rank in ranks for tensor in rank.values()]
        has_head = any("lm_head.weight" in rank for rank in ranks)
        has_bias = "transformer.layers.0.attention.qkv.bias" in ranks[0]
        is_fp8 = quantization(config_file) == FP8_ALGORITHM
        dtype = _dtype(config_file) if is_fp8 else dominant_dtype(stored)
        self.config = read_config(config_file, dtype, not has_head, has_bias)
        check_config(self.config, self.source)
        _refuse_other_scales(stored, is_fp8)
        check_dtypes(tensor for tensor in stored if not (is_fp8 and tensor.dtype == FP8))
        self._layout = layout
        self._sources = {name: self._source(name, ranks) for name in weight_shapes(self.config)}
        _refuse_unknown(ranks, self._sources.values())
        check_weights(self.config, {name: self._shape(name) for name in self._sources}, self.source)

    def names(self) -> Iterable[str]:
        return self._sources.keys()

    def is_group_quantized(self, name: str) -> bool:
        self._find(name)
        return False

    def tensor(self, name: str) -> Tensor:
        parts, axis, scales = self._find(name)
        arrays = [self._slice(name, _read(part, scale)) for part, scale in zip(parts, scales, strict=True)]
        if axis is None or len(arrays) == 1:
            return DenseTensor(self._without_padding(name, arrays[0]))
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            arrays = arrays[:: self._copies_of_a_key_head]
        return DenseTensor(self._without_padding(name, np.concatenate(arrays, axis=axis)))

    def tokenizer_files(self) -> TokenizerFiles:
        """Those that a person has put there: TensorRT-LLM keeps the tokenizer elsewhere."""
        return tokenizer_files(self._directory)

    def _find(self, name: str) -> _Source:
        if name not in self._sources:
            raise CheckpointError(f"{self.source} has no weight {name}")
        return self._sources[name]

    def _source(self, name: str, ranks: list[dict[str, StoredTensor]]) -> _Source:
        """Look a weight up in the ranks of its stage."""
        module, _, kind = name.rpartition(".")
        layout, layers = self._layout, self.config.num_hidden_layers
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            stage, local = layout.stage_of(int(number), layers)
            theirs, axis = _NAMES[module]
            theirs = f"transformer.layers.{local}.{theirs}"
        else:
            stage = 0 if module == "model.embed_tokens" else layout.pp_size - 1
            theirs, axis = _NAMES[module]
            if module == "model.embed_tokens":
                axis = layout.embedding_axis
        if kind == "bias" and axis == 1:
            axis = None  # added once, behind the sum over ranks
        theirs = f"{theirs}.{kind}"
        group = ranks[stage * layout.tp_size : (stage + 1) * layout.tp_size]
        for index, rank in enumerate(group):
            if theirs not in rank:
                where = f"rank{stage * layout.tp_size + index}.safetensors"
                raise CheckpointError(f"{self._directory / where} has no weight {theirs}")
        group = group if axis is not None else group[:1]
        scale = f"{theirs.removesuffix('weight')}{_WEIGHT_SCALE}"
        scales = [_scale(rank[theirs], rank.get(scale)) for rank in group]
        return _Source([rank[theirs] for rank in group], axis, scales)

    def _slice(self, name: str, fused: NDArray[np.generic]) -> NDArray[np.generic]:
        """Of q, k and v in one matrix, the one that `name` asks for."""
        rows = self._rows_in_fused(name)
        return fused if rows is None else fused[rows]

    def _rows_in_fused(self, name: str) -> slice | None:
        module = name.split(".")[-2]
        if module not in ("q_proj", "k_proj", "v_proj"):
            return None
        config, tp_size = self.config, self._layout.tp_size
        query = config.num_attention_heads // tp_size * config.head_size
        key = max(1, config.num_key_value_heads // tp_size) * config.head_size
        first = {"q_proj": 0, "k_proj": query, "v_proj": query + key}[module]
        return slice(first, first + (query if module == "q_proj" else key))

    @property
    def _copies_of_a_key_head(self) -> int:
        """Ranks that hold the same one, where there are more ranks than key heads."""
        return max(1, self._layout.tp_size // self.config.num_key_value_heads)

    def _shape(self, name: str) -> tuple[int, ...]:
        parts, axis, _ = self._sources[name]
        shape = list(parts[0].shape)
        rows = self._rows_in_fused(name)
        if rows is not None:
            shape[0] = min(rows.stop, shape[0]) - min(rows.start, shape[0])
        if axis is not None:
            copies = self._copies_of_a_key_head if name.split(".")[-2] in ("k_proj", "v_proj") else 1
            shape[axis] *= len(parts) // copies
        if self._is_vocabulary(name) and shape[0] >= self.config.vocab_size:
            shape[0] = self.config.vocab_size
        return tuple(shape)

    def _without_padding(self, name: str, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """The vocabulary is filled up to a multiple of the ranks where it is shared."""
        return array[: self.config.vocab_size] if self._is_vocabulary(name) else array

    @staticmethod
    def _is_vocabulary(name: str) -> bool:
        return name in ("model.embed_tokens.weight", "lm_head.weight")


def _rank_path(directory: Path, rank: int, layout: Layout) -> Path:
    path = directory / f"rank{rank}.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f"{directory} lacks {path.name}: its config.json says tp_size {layout.tp_size}, pp_size {layout.pp_size}"
        )
    return path


def _dtype(config: JsonObject) -> str:
    """What a quantized checkpoint's other weights were before."""
    dtype = config.string("dtype")
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"{config.source}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES.values())}"
        )
    return dtype


def _scale(weight: StoredTensor, scale: StoredTensor | None) -> StoredTensor | None:
    """The factor of a weight; raises `CheckpointError` where one has it and the other does not want it."""
    if (weight.dtype == FP8) != (scale is not None):
        raise CheckpointError(
            f"{weight.path}: {weight.name} is of type {weight.dtype} and has "
            f"{'no' if scale is None else 'a'} {_WEIGHT_SCALE}; FP8 needs one, other types must have none"
        )
    if scale is not None and (prod(scale.shape) != 1 or scale.dtype != "F32"):
        raise CheckpointError(
            f"{scale.path}: {scale.name} is {scale.dtype}{list(scale.shape)}; it must be one number of type F32"
        )
    return scale


def _read(weight: StoredTensor, scale: StoredTensor | None) -> NDArray[np.generic]:
    values = weight.read()
    return values if scale is None else values.astype(np.float32) * scale.read().astype(np.float32).reshape(())


def _refuse_other_scales(stored: Iterable[StoredTensor], is_fp8: bool) -> None:
    for tensor in stored:
        if is_fp8 and tensor.name.endswith((_WEIGHT_SCALE, *_UNUSED_SCALES)):
            continue
        if tensor.name.endswith(_OTHER_SCALES) and not tensor.name.endswith(".kv_cache_scaling_factor"):
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} belongs to quantized weights, which are not read; "
                "give the float checkpoint and --weight_dtype"
            )


def _refuse_unknown(ranks: list[dict[str, StoredTensor]], sources: Iterable[_Source]) -> None:
    """A weight that no name asks for would give another model's answers."""
    used = {part.name for source in sources for part in (*source.parts, *filter(None, source.scales))}
    for rank in ranks:
        for name, tensor in rank.items():
            if name not in used and not name.endswith(_UNUSED_SCALES):
                raise CheckpointError(f"{tensor.path}: weight {name} has no place in a model of the Llama family")
