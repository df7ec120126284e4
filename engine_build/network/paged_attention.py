"""`PagedAttention`, the one operator of our own domain: its definition, executable.

```
query rows   | a a a | b | c c |              three sequences, rows packed
block table    a: 4 1   b: 0   c: 7 2 5       position p of a sequence lives in
                                              cache[table[p // tokens_per_block], :, p % tokens_per_block]
```

Each call first writes the K and V of its rows into the block pool, then lets every row attend to the positions of
its own sequence up to and including itself. The pool is changed in place: `key_cache` and `value_cache` are inputs
that outlive the call, not values that the graph computes.

Targets translate the operator to what they have; this file says what it means, in plain numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

DOMAIN = "inflight"
DOMAIN_VERSION = 1
OPERATOR = "PagedAttention"


def paged_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    past_lens: NDArray[np.int32],
    subsequence_begins: NDArray[np.int32],
    block_indices: NDArray[np.int32],
    block_indices_begins: NDArray[np.int32],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    sliding_window: int,
    soft_cap: float = 0.0,
) -> NDArray[Any]:
    """Write this step's K and V, then attend. T rows of B sequences; N entries in all block tables.

    Args:
        query: `[T, num_heads * head_size]`.
        key: `[T, num_kv_heads * head_size]`; query head h reads key head `h * num_kv_heads // num_heads`.
        value: as `key`.
        key_cache: `[num_blocks, num_kv_heads, tokens_per_block, head_size]`, any float type; written in place.
        value_cache: as `key_cache`.
        past_lens: `[B]` positions of the sequence already in the pool.
        subsequence_begins: `[B + 1]` first row of each sequence, ending with T; every sequence has a row or more.
        block_indices: `[N]` block tables, concatenated.
        block_indices_begins: `[B + 1]` first entry of each table, ending with N.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: elements of one head.
        scale: factor on the scores before the softmax.
        sliding_window: a row attends to so many positions, its own included; 0 for all.
        soft_cap: bounds scores smoothly, `soft_cap * tanh(score / soft_cap)`; 0, or no such attribute, for no bound.

    Returns:
        `[T, num_heads * head_size]` of the query's type; scores and sums are computed in float32.
    """
    tokens_per_block = key_cache.shape[2]
    output = np.empty(query.shape, dtype=query.dtype)
    for sequence, past in enumerate(past_lens):
        begin, end = subsequence_begins[sequence : sequence + 2]
        first_entry, last_entry = block_indices_begins[sequence : sequence + 2]
        table = block_indices[first_entry:last_entry]
        rows, context = slice(begin, end), past + end - begin
        position = np.arange(past, context)

        block, offset = table[position // tokens_per_block], position % tokens_per_block
        for cache, new in ((key_cache, key), (value_cache, value)):
            cache[block, :, offset] = new[rows].reshape(-1, num_kv_heads, head_size).astype(cache.dtype)

        keys, values = (
            cache[table].swapaxes(0, 1).reshape(num_kv_heads, -1, head_size)[:, :context].astype(np.float32)
            for cache in (key_cache, value_cache)
        )
        queries = query[rows].astype(np.float32).reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_size)
        scores = scale * np.einsum("rkgd,kcd->rkgc", queries, keys)
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        attended = np.arange(context)
        hidden = attended > position[:, None]
        if sliding_window:
            hidden |= attended <= position[:, None] - sliding_window
        scores[np.broadcast_to(hidden[:, None, None, :], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[rows] = np.einsum("rkgc,kcd->rkgd", weights, values).reshape(end - begin, -1).astype(query.dtype)
    return output


class PagedAttention(OpRun):  # type: ignore[misc]
    """The operator for `onnx.reference.ReferenceEvaluator(model, new_ops=[PagedAttention])`.

    Feed caches as arrays you own: they are written in place. `max_context_len` is a bound for targets that size
    buffers by it; the definition needs none.
    """

    op_domain = DOMAIN

    def _run(self, *inputs: NDArray[Any], **attributes: Any) -> tuple[NDArray[Any]]:
        *tensors, _max_context_len = inputs
        return (paged_attention(*tensors, **attributes),)
