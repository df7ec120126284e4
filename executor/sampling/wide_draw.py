"""Draws from one row where more tokens are kept than it pays to rank.

The tokens that are kept need not be in order to be drawn from; only the value that the last of them has must be
known. So values are sorted without their token ids, and the draw goes by token id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def draw_wide(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """Draw a token of `logits` `[vocab]`, which has a finite maximum and no NaN.

    The parameters mean what they mean in `executor.sampling.draw.DrawParameters`.
    """
    vocab_size = len(logits)
    weights = np.exp((logits - logits.max()) * np.float32(1 / temperature))
    candidates: NDArray[np.int64] | None = None
    if 0 < top_k < vocab_size:
        least = np.partition(logits, vocab_size - top_k)[vocab_size - top_k]
        candidates = _first_of_equals(np.flatnonzero(logits >= least), logits, least, top_k)
        weights = weights[candidates]
    if top_p < 1:
        total = weights.sum(dtype=np.float64)
        # Tokens that weigh at most this weigh at most (1 - top_p) * total together: the nucleus is complete without.
        worth_sorting = weights > np.float32((1 - top_p) * total / len(weights) / 2)
        falling = np.sort(weights[worth_sorting])[::-1]
        reached = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), top_p * total))
        if reached < len(falling) - 1:
            least = falling[reached]
            kept = _first_of_equals(np.flatnonzero(weights >= least), weights, least, reached + 1)
            candidates = kept if candidates is None else candidates[kept]
            weights = weights[kept]
    cumulated = np.cumsum(np.where(weights >= np.float32(min_p), weights, 0), dtype=np.float64)
    place = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    # The product may round up to the whole sum; the last token with a weight is meant then.
    place = min(place, int(np.searchsorted(cumulated, cumulated[-1])))
    return place if candidates is None else int(candidates[place])


def _first_of_equals(
    token_ids: NDArray[np.int64], values: NDArray[np.float32], least: np.float32, count: int
) -> NDArray[np.int64]:
    """Drop so many of the tokens whose value is `least`, from the end, that `count` are left."""
    surplus = len(token_ids) - count
    if surplus <= 0:
        return token_ids
    equals = np.flatnonzero(values[token_ids] == least)
    return np.delete(token_ids, equals[len(equals) - surplus :])
