"""`PagedAttention`, the one operator of our own domain, as torch says it most plainly.

```
position p of a sequence    -> block  table[p // tokens_per_block], slot p % tokens_per_block
pool                        [num_blocks, num_kv_heads, tokens_per_block, head_size]
```
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.engines.reference_kv_cache import gather, tokens_per_block, write_rows


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    past_lens: Tensor,
    subsequence_begins: Tensor,
    block_indices: Tensor,
    block_indices_begins: Tensor,
    max_context_len: Tensor,  # noqa: ARG001 (a hint for kernels that size their workspace by it)
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    sliding_window: int,
    soft_cap: float = 0.0,
) -> Tensor:
    """Write this step's keys and values into the pool, then attend causally through the block tables.

    Args:
        query: `[T, num_heads * head_size]`, rotated.
        key: `[T, num_kv_heads * head_size]`, rotated.
        value: `[T, num_kv_heads * head_size]`.
        key_cache: a pool as `reference_kv_cache` lays it out, of any of its types; written in place.
        value_cache: like `key_cache`.
        past_lens: `[B]`, see `StepInputs`; so are the next three.
        subsequence_begins: `[B + 1]`.
        block_indices: `[N]`.
        block_indices_begins: `[B + 1]`.
        max_context_len: scalar.
        num_heads: query heads; `num_heads / num_kv_heads` of them share a key head.
        num_kv_heads: key and value heads.
        head_size: elements of a head.
        scale: multiplies the scores before the softmax.
        sliding_window: positions a query sees, its own included; 0 for all of them.
        soft_cap: bounds scores smoothly, `soft_cap * tanh(score / soft_cap)`; 0 leaves them as they are.

    Returns:
        `[T, num_heads * head_size]` in the query's dtype. Computed in float32 from what the pool holds, so a pool of
        a narrower dtype rounds keys and values once, when they are written.
    """
    block_size = tokens_per_block(key_cache, head_size)
    queries = query.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_size).float()
    keys = key.reshape(-1, num_kv_heads, head_size)
    values = value.reshape(-1, num_kv_heads, head_size)
    output = torch.empty_like(queries)

    row_begins, table_begins = subsequence_begins.tolist(), block_indices_begins.tolist()
    for sequence, past in enumerate(past_lens.tolist()):
        rows = slice(row_begins[sequence], row_begins[sequence + 1])
        table = block_indices[table_begins[sequence] : table_begins[sequence + 1]].long()
        num_rows = rows.stop - rows.start
        positions = torch.arange(past, past + num_rows, device=query.device)
        blocks, slots = table[positions // block_size], positions % block_size
        write_rows(key_cache, blocks, slots, keys[rows])
        write_rows(value_cache, blocks, slots, values[rows])

        context_keys = gather(key_cache, table, head_size)
        context_values = gather(value_cache, table, head_size)
        for row in range(num_rows):
            end = past + row + 1
            begin = max(0, end - sliding_window) if sliding_window else 0
            scores = queries[rows.start + row] @ context_keys[:, begin:end].mT * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            output[rows.start + row] = scores.softmax(dim=-1) @ context_values[:, begin:end]
    return output.reshape(-1, num_heads * head_size).to(query.dtype)
