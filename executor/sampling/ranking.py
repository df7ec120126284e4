"""The most likely tokens of many rows, without sorting the vocabulary.

Only groups that can hold a wanted token are looked at. The k-th largest group maximum is a lower bound of the k-th
largest logit: k groups each hold one at least as large. So the tokens at or above it are the k most likely ones and a
few more, and what is kept of them depends on the row alone, never on the rows beside it: equal logits are ordered by
token id.

```
coarse groups ──► those at or above the bound ──► their fine groups ──► those at or above it ──► their tokens
 512 a row          k or so                         8 each                k or so                  12 each
```
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.row_passes import Maxima

_LOWEST = np.finfo(np.float32).min

_MAX_ROWS = 4096
"""Row numbers share a 64-bit sort key with a logit and a token id."""


class RankedTokens(NamedTuple):
    """Tokens by falling logit for R rows, K ranks wide; `values` is -inf where a row has fewer."""

    token_ids: NDArray[np.int64]
    """[R, K]"""
    values: NDArray[np.float32]
    """[R, K]"""


def rank_most_likely(
    logits: NDArray[np.float32], rows: NDArray[np.int64], maxima: Maxima, counts: NDArray[np.int64]
) -> RankedTokens:
    """The `counts[r]` most likely tokens of each row, in order, or all that are not at -inf.

    Args:
        logits: `[S, vocab]`, C-contiguous, without NaN in `rows`.
        rows: `[R]`.
        maxima: of these rows.
        counts: `[R]`, at least 1 and at most `vocab`.
    """
    groups = maxima.coarse.shape[1]
    # Excluded tokens, at -inf, are never wanted.
    thresholds = np.full(len(rows), _LOWEST, np.float32)
    bounded = np.flatnonzero(counts <= groups)
    if bounded.size:
        ranks = groups - counts[bounded]
        parted = np.partition(maxima.coarse[bounded], np.unique(ranks), axis=1)
        thresholds[bounded] = np.maximum(parted[np.arange(len(bounded)), ranks], _LOWEST)
    ranked = _rank_above(logits, rows, maxima, thresholds)
    width = int(counts.max())
    values = ranked.values[:, :width]
    values[np.arange(values.shape[1]) >= counts[:, None]] = -np.inf
    return RankedTokens(ranked.token_ids[:, :width], values)


class _Found(NamedTuple):
    """Groups or tokens at or above their row's threshold."""

    rows: NDArray[np.int64]
    """[n] index into R, rising."""
    places: NDArray[np.int64]
    """[n] group or token"""
    values: NDArray[np.float32]
    """[n]"""


def _rank_above(
    logits: NDArray[np.float32], rows: NDArray[np.int64], maxima: Maxima, thresholds: NDArray[np.float32]
) -> RankedTokens:
    """All tokens of each row whose logit is at least `thresholds[r]`, in order."""
    if len(rows) > _MAX_ROWS:
        raise ValueError(f"{len(rows)} rows at once; at most {_MAX_ROWS} can be ranked")
    hits = np.flatnonzero(maxima.coarse >= thresholds[:, None])
    hit_rows, hit_groups = np.divmod(hits, maxima.coarse.shape[1])
    fine = _members(maxima.fine, hit_rows, hit_rows, hit_groups, maxima.coarse.shape[1], thresholds)
    tokens = _members(logits, rows[fine.rows], fine.rows, fine.places, maxima.fine.shape[1], thresholds)
    return _sorted_by_row(tokens, len(rows), logits.shape[1])


def _members(
    values: NDArray[np.float32],
    value_rows: NDArray[np.int64],
    rows: NDArray[np.int64],
    groups: NDArray[np.int64],
    num_groups: int,
    thresholds: NDArray[np.float32],
) -> _Found:
    """What is at or above the threshold in n groups of `values` `[any, width]`; group i is `groups[i]` of row
    `value_rows[i]`, whose index into R is `rows[i]`."""
    width = values.shape[1]
    steps = np.arange(0, width, num_groups)
    begins = value_rows * width
    flat = (begins + groups)[:, None] + steps
    if width % num_groups:
        outside = groups[:, None] + steps >= width
        flat[outside] = 0
    taken = values.reshape(-1).take(flat)
    high = taken >= thresholds[rows][:, None]
    if width % num_groups:
        high &= ~outside
    found = np.flatnonzero(high)
    group = found // len(steps)
    return _Found(rows[group], flat.reshape(-1)[found] - begins[group], taken.reshape(-1)[found])


def _sorted_by_row(found: _Found, num_rows: int, vocab_size: int) -> RankedTokens:
    """Sort by row, falling value, token id. All three fit one 64-bit key, and sorting integers is fast."""
    token_bits = np.uint64(max(1, (vocab_size - 1).bit_length()))
    # 0.0 and -0.0 are equal logits; adding 0.0 makes them one pattern.
    bits = (found.values + np.float32(0.0)).view(np.uint32)
    # Unsigned order of the flipped pattern is falling order of the floats.
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = (found.rows.astype(np.uint64) << (token_bits + np.uint64(32))) | (falling.astype(np.uint64) << token_bits)
    keys |= found.places.astype(np.uint64)
    keys.sort()

    counts = np.bincount(found.rows, minlength=num_rows)
    begins = np.cumsum(counts) - counts
    row_of = np.repeat(np.arange(num_rows), counts)
    rank_of = np.arange(len(keys)) - begins[row_of]
    falling = (keys >> token_bits).astype(np.uint32)
    shape = (num_rows, int(counts.max(initial=0)))
    ranked = RankedTokens(np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32))
    ranked.token_ids[row_of, rank_of] = (keys & ((np.uint64(1) << token_bits) - np.uint64(1))).astype(np.int64)
    ranked.values[row_of, rank_of] = np.where(falling >> 31, falling, falling ^ np.uint32(0x7FFFFFFF)).view(np.float32)
    return ranked
