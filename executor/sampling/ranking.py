"""The most likely tokens of many rows, without sorting the vocabulary.

Token t belongs to group `t % num_groups`. The maximum of each group costs one pass over the logits; from then on only
groups that can hold a wanted token are looked at:

```
row       | t0  t1  t2  t3 | t4  t5  t6  t7 | t8  t9 |       num_groups = 4
group 1         ^                ^               ^           maxima[1] = max(t1, t5, t9)
```

The k-th largest group maximum is a lower bound of the k-th largest logit: k groups each hold one at least as large.
So the tokens at or above it are the k most likely ones and a few more, and what is kept of them depends on the row
alone, never on the rows beside it: equal logits are ordered by token id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_GROUPS = 2048
"""More groups make the first pass longer, fewer make each group longer to look through."""

_MAX_ROWS_AT_ONCE = 4096


class RankedTokens(NamedTuple):
    """Tokens by falling logit for R rows, K ranks wide; `values` is -inf where a row has fewer."""

    token_ids: NDArray[np.int64]
    """[R, K]"""
    values: NDArray[np.float32]
    """[R, K]"""


def num_groups(vocab_size: int) -> int:
    return min(vocab_size, _MAX_GROUPS)


def group_maxima(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The largest logit of each group of each row: `[S, vocab]` and `[R]` to `[R, num_groups]`. NaN where one is."""
    vocab_size = logits.shape[1]
    groups = num_groups(vocab_size)
    whole = vocab_size - vocab_size % groups
    maxima = np.empty((len(rows), groups), np.float32)
    for row, out in zip(rows, maxima, strict=True):
        np.maximum.reduce(logits[row, :whole].reshape(-1, groups), axis=0, out=out)
    if whole < vocab_size:
        rest = maxima[:, : vocab_size - whole]
        np.maximum(rest, logits[rows, whole:], out=rest)
    return maxima


def rank_most_likely(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    counts: NDArray[np.int64],
) -> RankedTokens:
    """The `counts[r]` most likely tokens of each row, in order.

    Args:
        logits: `[S, vocab]`, C-contiguous, without NaN in `rows`.
        rows: `[R]`.
        maxima: `[R, num_groups]`, the rows' `group_maxima`.
        counts: `[R]`, at least 1 and at most `vocab`.
    """
    groups = maxima.shape[1]
    ranks = np.unique(groups - counts[counts <= groups])
    thresholds = np.full(len(rows), -np.inf, np.float32)
    if ranks.size:
        parted = np.partition(maxima, ranks, axis=1)
        bounded = np.flatnonzero(counts <= groups)
        thresholds[bounded] = parted[bounded, groups - counts[bounded]]
    ranked = rank_above(logits, rows, maxima, thresholds)
    width = int(counts.max())
    values = ranked.values[:, :width]
    values[np.arange(values.shape[1]) >= counts[:, None]] = -np.inf
    return RankedTokens(ranked.token_ids[:, :width], values)


def rank_above(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    thresholds: NDArray[np.float32],
) -> RankedTokens:
    """All tokens of each row whose logit is at least `thresholds[r]`, in order."""
    if len(rows) > _MAX_ROWS_AT_ONCE:
        raise ValueError(f"{len(rows)} rows at once; at most {_MAX_ROWS_AT_ONCE} can be ranked")
    vocab_size = logits.shape[1]
    groups = maxima.shape[1]
    hits = np.flatnonzero(maxima >= thresholds[:, None])
    hit_rows, hit_groups = np.divmod(hits, groups)
    members = hit_groups[:, None] + np.arange(0, vocab_size, groups)
    inside = members < vocab_size
    flat = (rows[hit_rows] * vocab_size)[:, None] + np.minimum(members, vocab_size - 1)
    values = logits.reshape(-1).take(flat)
    found = np.flatnonzero((values >= thresholds[hit_rows, None]) & inside)
    return _sorted_by_row(
        hit_rows[found // members.shape[1]],
        members.reshape(-1)[found],
        values.reshape(-1)[found],
        len(rows),
        vocab_size,
    )


def _sorted_by_row(
    found_rows: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    values: NDArray[np.float32],
    num_rows: int,
    vocab_size: int,
) -> RankedTokens:
    """Sort by row, falling value, token id. All three fit one 64-bit key, and sorting integers is fast."""
    token_bits = np.uint64(max(1, (vocab_size - 1).bit_length()))
    row_shift = token_bits + np.uint64(32)
    # 0.0 and -0.0 are equal logits; adding 0.0 makes them one pattern.
    bits = (values + np.float32(0.0)).view(np.uint32)
    # Unsigned order of the flipped pattern is falling order of the floats.
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = (found_rows.astype(np.uint64) << row_shift) | (falling.astype(np.uint64) << token_bits)
    keys |= token_ids.astype(np.uint64)
    keys.sort()

    counts = np.bincount(found_rows, minlength=num_rows)
    begins = np.cumsum(counts) - counts
    row_of = np.repeat(np.arange(num_rows), counts)
    rank_of = np.arange(len(keys)) - begins[row_of]
    falling = (keys >> token_bits).astype(np.uint32)
    shape = (num_rows, int(counts.max(initial=0)))
    ranked = RankedTokens(np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32))
    ranked.token_ids[row_of, rank_of] = (keys & ((np.uint64(1) << token_bits) - np.uint64(1))).astype(np.int64)
    ranked.values[row_of, rank_of] = np.where(falling >> 31, falling, falling ^ np.uint32(0x7FFFFFFF)).view(np.float32)
    return ranked
