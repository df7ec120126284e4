"""The rows of a pool, whatever it keeps them in: as they are, or in 8 bits with a scale for each.

```
float types    [num_blocks, num_kv_heads, tokens_per_block, head_size]
8 bits         [num_blocks, num_kv_heads, chunk]     chunk = tokens_per_block x head_size elements, then as many scales
```
`engine_build.kernels.shape` says how 8 bits are laid out, for these functions and for the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_build.kernels.shape import EIGHT_BIT_MAXIMA

KV_CACHE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_MAXIMA = {KV_CACHE_DTYPES[name]: maximum for name, maximum in EIGHT_BIT_MAXIMA.items()}
_SMALLEST = 1e-30
"""Stands for the magnitude of a row of zeros, whose scale would be 0."""


def block_shape(num_kv_heads: int, tokens_per_block: int, head_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of one block, keys or values."""
    if dtype in _MAXIMA:
        return num_kv_heads, tokens_per_block * (head_size + torch.float32.itemsize)
    return num_kv_heads, tokens_per_block, head_size


def tokens_per_block(cache: Tensor, head_size: int) -> int:
    size: int = cache.shape[2]
    return size // (head_size + torch.float32.itemsize) if cache.dtype in _MAXIMA else size


def write_rows(cache: Tensor, blocks: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows `[R, num_kv_heads, head_size]` into the slots of their blocks, both `[R]`."""
    if cache.dtype not in _MAXIMA:
        cache[blocks, :, slots] = rows.to(cache.dtype)
        return
    values, scales = _parts(cache, rows.shape[-1])
    wide = rows.float()
    row_scales = wide.abs().amax(dim=-1).clamp(min=_SMALLEST) / _MAXIMA[cache.dtype]
    quotients = wide / row_scales[..., None]
    if cache.dtype == torch.int8:
        quotients = torch.floor(quotients + 0.5)
    values[blocks, :, slots] = quotients.to(cache.dtype).view(torch.uint8)
    scales[blocks, :, slots] = row_scales


def gather(cache: Tensor, table: Tensor, head_size: int) -> Tensor:
    """Blocks of one sequence as `[num_kv_heads, len(table) * tokens_per_block, head_size]`, float32."""
    if cache.dtype not in _MAXIMA:
        return cache[table].transpose(0, 1).flatten(1, 2).float()
    values, scales = _parts(cache, head_size)
    rows = values[table].view(cache.dtype).float() * scales[table][..., None]
    return rows.transpose(0, 1).flatten(1, 2)


def _parts(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Elements `[num_blocks, num_kv_heads, tokens_per_block, head_size]` as bytes, and their scales; views."""
    raw = cache.view(torch.uint8)
    split = tokens_per_block(cache, head_size) * head_size
    values = raw[..., :split].unflatten(-1, (-1, head_size))
    return values, raw[..., split:].view(torch.float32)
