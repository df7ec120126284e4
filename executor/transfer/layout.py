"""How instances keep keys and values, and how blocks of one layout become blocks of another: pure functions.

```
a block    [layers, 2 (keys, values), heads, tokens, row]          row: head_size elements, or for uint8
                                                                        float32 scale, float32 zero point, bytes
sender     TP 2, 16 tokens a block           receiver   TP 1, 32 tokens a block
  rank 0   heads 0-3  | b0 | b1 | b2 |          heads 0-7  |    b0   |    b1   |
  rank 1   heads 4-7  | b0 | b1 | b2 |                        split / concat: layers, heads; then tokens; then dtype
```
Where layouts are equal none of this runs: bytes go from pool to pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_QUANTIZED_HEADER_BYTES = 8
"""float32 scale, float32 zero point, before the elements of a uint8 row."""

ELEMENT_TYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
}


class IncompatibleLayoutError(ValueError):
    """Blocks of two instances cannot be exchanged: says what differs."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How one instance (one rank of it) keeps keys and values."""

    dtype: str
    """A name in `ELEMENT_TYPES`."""
    tokens_per_block: int
    head_size: int
    num_layers: int
    """Of the whole model."""
    num_kv_heads: int
    """Of the whole model."""
    layers: tuple[int, int]
    """First and last + 1 of those held here: a pipeline stage's."""
    heads: tuple[int, int]
    """First and last + 1 of those held here: a tensor-parallel rank's."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, keys or values."""
        header = _QUANTIZED_HEADER_BYTES if self.dtype == "uint8" else 0
        return header + self.head_size * ELEMENT_TYPES[self.dtype].itemsize

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[layers, 2, heads, tokens, row bytes]` of what is held here."""
        num_layers, num_heads = self.layers[1] - self.layers[0], self.heads[1] - self.heads[0]
        return num_layers, 2, num_heads, self.tokens_per_block, self.row_bytes

    @property
    def bytes_per_block(self) -> int:
        return int(np.prod(self.block_shape))

    def check(self) -> None:
        """Raises `IncompatibleLayoutError` for numbers that no instance has."""
        if self.dtype not in ELEMENT_TYPES:
            raise IncompatibleLayoutError(f"dtype is {self.dtype!r}; known are {', '.join(ELEMENT_TYPES)}")
        for name in ("tokens_per_block", "head_size", "num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise IncompatibleLayoutError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, (first, last), total in (
            ("layers", self.layers, self.num_layers),
            ("heads", self.heads, self.num_kv_heads),
        ):
            if not 0 <= first < last <= total:
                raise IncompatibleLayoutError(f"{name} are {first} to {last} of {total}; that is none of them")


def check_compatible(sender: KvLayout, receiver: KvLayout) -> None:
    """Whether blocks of `sender` can become blocks of `receiver` at all.

    Raises:
        IncompatibleLayoutError: names what differs and what both have.
    """
    sender.check()
    receiver.check()
    for name in ("head_size", "num_layers", "num_kv_heads"):
        here, there = getattr(receiver, name), getattr(sender, name)
        if here != there:
            raise IncompatibleLayoutError(f"{name} is {there} at the sender and {here} at the receiver")
    if sender.dtype == "uint8" and receiver.dtype != "uint8":
        raise IncompatibleLayoutError(
            f"the sender keeps 8 bits (uint8), the receiver {receiver.dtype}: what rounding took is lost"
        )
    for name in ("layers", "heads"):
        if _overlap(getattr(sender, name), getattr(receiver, name)) is None:
            raise IncompatibleLayoutError(
                f"the sender holds {name} {getattr(sender, name)}, the receiver {getattr(receiver, name)}: "
                "they have none in common"
            )


def shards(layout: KvLayout, tensor_parallel: int, pipeline_parallel: int) -> list[KvLayout]:
    """The layouts of all ranks of a model that is split, pipeline stage by stage, heads within a stage.

    Raises:
        IncompatibleLayoutError: layers or heads cannot be split so.
    """
    if layout.num_kv_heads % tensor_parallel or layout.num_layers % pipeline_parallel:
        raise IncompatibleLayoutError(
            f"{layout.num_kv_heads} heads and {layout.num_layers} layers cannot be split over "
            f"{tensor_parallel} tensor-parallel and {pipeline_parallel} pipeline ranks"
        )
    num_heads, num_layers = layout.num_kv_heads // tensor_parallel, layout.num_layers // pipeline_parallel
    return [
        KvLayout(
            layout.dtype,
            layout.tokens_per_block,
            layout.head_size,
            layout.num_layers,
            layout.num_kv_heads,
            (stage * num_layers, (stage + 1) * num_layers),
            (rank * num_heads, (rank + 1) * num_heads),
        )
        for stage in range(pipeline_parallel)
        for rank in range(tensor_parallel)
    ]


def relayout(
    sources: Sequence[tuple[KvLayout, NDArray[np.uint8]]], receiver: KvLayout, num_tokens: int
) -> NDArray[np.uint8]:
    """Blocks of several senders' ranks as blocks of one receiver.

    Args:
        sources: for each sender its layout and blocks `[blocks, bytes_per_block]` of the tokens from 0 on; together
            they hold every layer and head of the receiver.
        receiver: the layout wanted.
        num_tokens: tokens that count; what lies behind them in the last block is zero in the result.

    Returns:
        `[ceil(num_tokens / receiver.tokens_per_block), receiver.bytes_per_block]`.

    Raises:
        IncompatibleLayoutError: a sender's blocks cannot be used, or layers, heads or tokens are missing.
    """
    rows = gather(sources, receiver, num_tokens)
    if sources[0][0].dtype != receiver.dtype:
        rows = convert_rows(rows, sources[0][0].dtype, receiver.dtype)
    return to_blocks(rows, receiver)


def gather(
    sources: Sequence[tuple[KvLayout, NDArray[np.uint8]]], receiver: KvLayout, num_tokens: int
) -> NDArray[np.uint8]:
    """Rows `[layers, 2, heads, num_tokens, row]` of the receiver's layers and heads, in the senders' dtype."""
    num_layers, _, num_heads, _, _ = receiver.block_shape
    rows = np.zeros((num_layers, 2, num_heads, num_tokens, sources[0][0].row_bytes), np.uint8)
    is_filled = np.zeros((num_layers, num_heads), bool)
    for layout, blocks in sources:
        check_compatible(layout, receiver)
        if layout.dtype != sources[0][0].dtype:
            raise IncompatibleLayoutError(f"one sender keeps {sources[0][0].dtype}, another {layout.dtype}")
        tokens = to_rows(blocks, layout)
        if tokens.shape[3] < num_tokens:
            raise IncompatibleLayoutError(f"a sender's blocks hold {tokens.shape[3]} tokens of {num_tokens}")
        layers, heads = _overlap(layout.layers, receiver.layers), _overlap(layout.heads, receiver.heads)
        assert layers is not None, "checked above"
        assert heads is not None, "checked above"
        here = (_span(layers, receiver.layers), slice(None), _span(heads, receiver.heads))
        there = (_span(layers, layout.layers), slice(None), _span(heads, layout.heads), slice(num_tokens))
        rows[here] = tokens[there]
        is_filled[here[0], here[2]] = True
    if not is_filled.all():
        layer, head = np.argwhere(~is_filled)[0]
        raise IncompatibleLayoutError(
            f"no sender holds layer {layer + receiver.layers[0]}, head {head + receiver.heads[0]}"
        )
    return rows


def to_rows(blocks: NDArray[np.uint8], layout: KvLayout) -> NDArray[np.uint8]:
    """Blocks `[blocks, bytes_per_block]` as rows `[layers, 2, heads, blocks * tokens_per_block, row]`."""
    num_layers, two, num_heads, num_tokens, row = layout.block_shape
    shaped = blocks.reshape(len(blocks), num_layers, two, num_heads, num_tokens, row)
    return np.moveaxis(shaped, 0, 3).reshape(num_layers, two, num_heads, len(blocks) * num_tokens, row)


def to_blocks(rows: NDArray[np.uint8], layout: KvLayout) -> NDArray[np.uint8]:
    """Rows `[layers, 2, heads, tokens, row]` as blocks `[blocks, bytes_per_block]`, the last one filled with zeros."""
    num_layers, two, num_heads, size, row = layout.block_shape
    num_blocks = -(-rows.shape[3] // size)
    padding = num_blocks * size - rows.shape[3]
    if padding:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    shaped = rows.reshape(num_layers, two, num_heads, num_blocks, size, row)
    return np.ascontiguousarray(np.moveaxis(shaped, 3, 0)).reshape(num_blocks, layout.bytes_per_block)


def convert_rows(rows: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """Rows `[..., row]` of one element type as rows of another; uint8 is a target only."""
    values = np.ascontiguousarray(rows).view(ELEMENT_TYPES[source]).astype(np.float32)
    if target == "uint8":
        return quantize_rows(values)
    return np.ascontiguousarray(values.astype(ELEMENT_TYPES[target])).view(np.uint8)


def quantize_rows(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 `[..., head_size]` as uint8 rows: `value = (byte - zero point) * scale`, a scale for each row.

    The same as OpenVINO's quantization by token, to within one step of the 255.
    """
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    scale = (high - low) / np.float32(255)
    scale = np.where(scale == 0, np.float32(1e-4), scale)
    zero_point = -low / scale
    quantized = np.clip(np.rint(values / scale + zero_point), 0, 255).astype(np.uint8)
    header = np.concatenate([scale, zero_point], -1).astype(np.float32)
    return np.concatenate([np.ascontiguousarray(header).view(np.uint8), quantized], -1)


def dequantize_rows(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What `quantize_rows` kept, as float32 `[..., head_size]`."""
    header = np.ascontiguousarray(rows[..., :_QUANTIZED_HEADER_BYTES]).view(np.float32)
    values = rows[..., _QUANTIZED_HEADER_BYTES:].astype(np.float32)
    return (values - header[..., 1:]) * header[..., :1]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first < last else None


def _span(common: tuple[int, int], held: tuple[int, int]) -> slice:
    return slice(common[0] - held[0], common[1] - held[0])
