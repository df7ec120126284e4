"""What an attention kernel is specialised for. Plain Python: a plan can be checked where Triton is not installed.

```
pool            [num_blocks, num_kv_heads, chunk]            one pool of keys and one of values for each layer
chunk           | token 0 | token 1 | ... |                  tokens_per_block x head_size elements
chunk, 8 bits   | token 0 | token 1 | ... | s0 s1 ... |      behind them a float32 scale for each token
```

An 8-bit element times its token's scale is the key or value. A token's scale is its largest magnitude over the largest
of the type, so a row's bytes depend on that row alone: not on a calibration, and not on what came before it.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""What queries, keys, values and outputs may be -> bytes of an element."""

EIGHT_BIT_MAXIMA = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""8-bit types of a pool -> the largest magnitude they hold."""

KV_CACHE_DTYPES = (*DTYPES, *EIGHT_BIT_MAXIMA)
HEAD_SIZES = range(16, 257)
_BYTES_OF_A_SCALE = 4
_GENERATION_ROWS = 8
"""A sequence of so many rows or fewer (one, or a few drafts to verify) is split along its context."""


class KernelError(Exception):
    """Kernels cannot be made for what was asked: names the value, and what would be right."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention. `check` raises what the constructor does not."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int
    dtype: str
    """Of queries, keys, values and outputs: one of `DTYPES`."""
    kv_cache_dtype: str
    """Of the pool: one of `KV_CACHE_DTYPES`."""
    scale: float
    """Multiplies the scores before the softmax."""
    sliding_window: int = 0
    """Positions a row sees, its own included; 0 for all."""
    soft_cap: float = 0.0
    """Scores become `soft_cap * tanh(score / soft_cap)`; 0 leaves them as they are."""

    def check(self) -> None:
        """Raises `KernelError` for a shape that no kernel here computes."""
        if self.dtype not in DTYPES:
            raise KernelError(f"dtype is {self.dtype!r}; attention kernels compute in {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise KernelError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; attention kernels keep keys and values as "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise KernelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_size not in HEAD_SIZES or self.head_size % 8:
            raise KernelError(
                f"head_size is {self.head_size}; it must be a multiple of 8 from {HEAD_SIZES.start} to {HEAD_SIZES[-1]}"
            )
        if self.tokens_per_block < 1:
            raise KernelError(f"tokens_per_block is {self.tokens_per_block}; it must be at least 1")
        if self.sliding_window < 0 or self.soft_cap < 0:
            raise KernelError("sliding_window and soft_cap must be 0 (off) or more")

    @property
    def is_eight_bit(self) -> bool:
        return self.kv_cache_dtype in EIGHT_BIT_MAXIMA

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of one block of one head, keys or values."""
        element = 1 if self.is_eight_bit else DTYPES[self.kv_cache_dtype]
        scale = _BYTES_OF_A_SCALE if self.is_eight_bit else 0
        return self.tokens_per_block * (self.head_size * element + scale)

    @property
    def elements_per_chunk(self) -> int:
        """The same in elements of the pool's type."""
        return self.bytes_per_chunk // (1 if self.is_eight_bit else DTYPES[self.kv_cache_dtype])


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts its work; what is computed does not depend on it beyond rounding."""

    tile_queries: int
    """Rows of the score matrix: query rows times the heads that share a key head, a power of two from 16 on."""
    tile_tokens: int
    """Columns of the score matrix: positions read in one pass of the loop, a power of two."""
    num_warps: int
    num_stages: int
    """Passes whose loads are in flight at once."""


def context_tiling(shape: AttentionShape) -> Tiling:
    """For sequences of many rows: tiles as tall as registers allow, since a key that is read serves all of its rows."""
    if shape.dtype == "float32":
        return _float32_tiling(shape.group_size)
    tile_queries = 64 if padded(shape.head_size) > 128 else 128
    return Tiling(max(tile_queries, padded(shape.group_size)), 32 if tile_queries == 64 else 64, 8, 2)


def generation_tiling(shape: AttentionShape, rows_per_sequence: int) -> Tiling:
    """For sequences of few rows: the least queries a tensor core takes, and many loads in flight."""
    tile_queries = max(16, padded(shape.group_size * rows_per_sequence))
    if shape.dtype == "float32":
        return _float32_tiling(tile_queries)
    return Tiling(tile_queries, 32 if padded(shape.head_size) > 128 else 64, 4, 3)


def _float32_tiling(least_queries: int) -> Tiling:
    """Without tensor cores: exact products, unrolled into so many registers that only the smallest tiles fit."""
    return Tiling(max(16, padded(least_queries)), 16, 8, 2)


def generation_rows(num_rows: int, num_sequences: int) -> int:
    """Rows that a sequence may have to be computed by the generation kernel, told by the step's shape alone."""
    return 1 if num_rows == num_sequences else _GENERATION_ROWS


def padded(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()
