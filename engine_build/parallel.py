"""One model on several devices: which device holds what, and a checkpoint as one of them sees it.

```
pp_size 2, tp_size 2        rank = pp_rank * tp_size + tp_rank        (TensorRT-LLM's numbering)

layers 0 .. n/2-1           rank 0 | rank 1       every matrix cut in two:
layers n/2 .. n-1           rank 2 | rank 3       q, k, v, gate, up by rows (heads), o, down by columns
```

A product cut by columns gives a part of a sum, so the network adds the parts up behind it (`AllReduce`). Where there
are fewer key heads than devices, several devices keep the same one. Devices of one stage compute the head for a share
of the vocabulary each and gather the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from engine_build.checkpoint.interface import (
    Checkpoint,
    CheckpointError,
    DenseTensor,
    GroupQuantizedTensor,
    Tensor,
    TokenizerFiles,
)
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.checkpoint.weight_shapes import weight_shapes

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_GROUP = 32
"""Columns under one scale of a `GroupQuantizedTensor`."""


class ParallelError(Exception):
    """A model cannot be divided so: names the sizes that do not go together."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One device among `tp_size * pp_size`."""

    tp_size: int = 1
    pp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @classmethod
    def of(cls, rank: int, tp_size: int, pp_size: int) -> Rank:
        return cls(tp_size, pp_size, rank % tp_size, rank // tp_size)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_group(self) -> tuple[int, ...]:
        """Ranks that add up and gather with this one."""
        return tuple(range(self.pp_rank * self.tp_size, (self.pp_rank + 1) * self.tp_size))

    def layers(self, num_hidden_layers: int) -> range:
        """Of the whole model's layers, those of this stage; earlier stages have one more where it does not come out."""
        base, more = divmod(num_hidden_layers, self.pp_size)
        first = self.pp_rank * base + min(self.pp_rank, more)
        return range(first, first + base + (self.pp_rank < more))

    def config(self, model: ModelConfig) -> ModelConfig:
        """The model as this device sees it: its share of heads, of the MLP and of the layers.

        Raises:
            ParallelError: the sizes cannot be shared evenly.
        """
        check_parallel(model, self.tp_size, self.pp_size)
        return replace(
            model,
            num_hidden_layers=len(self.layers(model.num_hidden_layers)),
            num_attention_heads=model.num_attention_heads // self.tp_size,
            num_key_value_heads=max(1, model.num_key_value_heads // self.tp_size),
            intermediate_size=model.intermediate_size // self.tp_size,
        )


def check_parallel(model: ModelConfig, tp_size: int, pp_size: int) -> None:
    """Raises `ParallelError` when the model cannot be divided so."""
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    for name, size in sizes.items():
        if size % tp_size:
            raise ParallelError(f"tp_size {tp_size} does not divide {name} {size}")
    heads = model.num_key_value_heads
    if heads % tp_size and tp_size % heads:
        raise ParallelError(f"tp_size {tp_size} neither divides num_key_value_heads {heads} nor is a multiple of it")
    if pp_size > model.num_hidden_layers:
        raise ParallelError(f"pp_size {pp_size} is more than the model's {model.num_hidden_layers} layers")


class RankCheckpoint:
    """Implements `Checkpoint`: what one rank holds of another checkpoint. Layers are numbered from 0."""

    def __init__(self, whole: Checkpoint, rank: Rank) -> None:
        """Raises `ParallelError` when the model cannot be divided so."""
        self.config = rank.config(whole.config)
        self.source = whole.source
        self._whole = whole
        self._rank = rank
        self._first_layer = rank.layers(whole.config.num_hidden_layers).start

    def names(self) -> Iterable[str]:
        return weight_shapes(self.config).keys()

    def is_group_quantized(self, name: str) -> bool:
        return self._whole.is_group_quantized(self._name_in_whole(name))

    def tensor(self, name: str) -> Tensor:
        whole_name = self._name_in_whole(name)
        tensor = self._whole.tensor(whole_name)
        module, kind = name.split(".")[-2:]
        if self._rank.tp_size == 1:
            return tensor
        if module in _BY_ROWS:
            return _rows(tensor, self._row_share(module, _num_rows(tensor)))
        if module in _BY_COLUMNS and kind == "weight":
            return _columns(tensor, self._share(_num_columns(tensor)), whole_name)
        return tensor

    def tokenizer_files(self) -> TokenizerFiles:
        return self._whole.tokenizer_files()

    def _row_share(self, module: str, rows: int) -> slice:
        """Of the rows of a matrix; a key head that several devices keep is cut out for each of them."""
        if module in ("k_proj", "v_proj"):
            heads = self._whole.config.num_key_value_heads
            if heads < self._rank.tp_size:
                size = rows // heads
                head = self._rank.tp_rank * heads // self._rank.tp_size
                return slice(head * size, (head + 1) * size)
        return self._share(rows)

    def _share(self, size: int) -> slice:
        share = size // self._rank.tp_size
        return slice(self._rank.tp_rank * share, (self._rank.tp_rank + 1) * share)

    def _name_in_whole(self, name: str) -> str:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(int(parts[2]) + self._first_layer)
        return ".".join(parts)


def _num_rows(tensor: Tensor) -> int:
    return len(tensor.data) if isinstance(tensor, DenseTensor) else len(tensor.values)


def _num_columns(tensor: Tensor) -> int:
    shape = tensor.data.shape if isinstance(tensor, DenseTensor) else tensor.values.shape
    return int(shape[1])


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    if isinstance(tensor, DenseTensor):
        return DenseTensor(tensor.data[rows])
    return GroupQuantizedTensor(tensor.values[rows], tensor.scales[rows])


def _columns(tensor: Tensor, columns: slice, name: str) -> Tensor:
    if isinstance(tensor, DenseTensor):
        return DenseTensor(np.ascontiguousarray(tensor.data[:, columns]))
    if columns.start % _GROUP or columns.stop % _GROUP:
        raise CheckpointError(f"{name}: a share of {columns.stop - columns.start} columns cuts its groups of {_GROUP}")
    groups = slice(columns.start // _GROUP, columns.stop // _GROUP)
    return GroupQuantizedTensor(np.ascontiguousarray(tensor.values[:, columns]), tensor.scales[:, groups])
