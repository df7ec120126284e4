"""From logits and uniform numbers to tokens: temperature, top-k, top-p, min-p.

The filters apply in this order, each to what the one before left: temperature, top-k, top-p (of the probability that
top-k left), min-p (relative to the most likely token). All of them keep the most likely tokens, so what is kept is a
number of ranks. The token is the inverse of the cumulated probability at the uniform number: over ranks where a
filter is on, else over groups of token ids, which needs no ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.ranking import group_maxima, num_groups, rank_most_likely
from executor.sampling.wide_draw import draw_wide

_FIRST_LOOK = 128
"""Ranks looked at first where only top-p or min-p limits them; few distributions need more."""

_MOST_RANKS = 512
"""A larger `top_k` is drawn row by row."""


class DrawParameters(NamedTuple):
    """One entry for each of R rows; neutral values turn a filter off."""

    temperature: NDArray[np.float64]
    """Above 0."""
    top_k: NDArray[np.int64]
    """0 keeps all."""
    top_p: NDArray[np.float64]
    """1 keeps all."""
    min_p: NDArray[np.float64]
    """0 keeps all."""
    uniform: NDArray[np.float64]
    """In [0, 1)."""

    def take(self, which: NDArray[np.int64]) -> DrawParameters:
        return DrawParameters(
            self.temperature[which], self.top_k[which], self.top_p[which], self.min_p[which], self.uniform[which]
        )


def draw(
    logits: NDArray[np.float32], rows: NDArray[np.int64], parameters: DrawParameters
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token for each row.

    Args:
        logits: `[S, vocab]`, C-contiguous. -inf excludes a token.
        rows: `[R]`.
        parameters: of each row.

    Returns:
        Token ids `[R]`, and the largest logit of each row `[R]`. Where that is not finite (NaN where the row holds
        one) the token id means nothing.
    """
    maxima = group_maxima(logits, rows)
    largest = maxima.max(axis=1)
    valid = np.isfinite(largest)
    everything = (parameters.top_k == 0) & (parameters.top_p >= 1) & (parameters.min_p <= 0)
    many = parameters.top_k > _MOST_RANKS
    token_ids = np.zeros(len(rows), np.int64)

    which = np.flatnonzero(valid & everything)
    if which.size:
        token_ids[which] = _draw_from_all(logits, rows[which], maxima[which], parameters.take(which))
    wide = valid & many
    which = np.flatnonzero(valid & ~everything & ~many)
    if which.size:
        token_ids[which], complete = _draw_ranked(logits, rows[which], maxima[which], parameters.take(which))
        wide[which] = ~complete
    for place in np.flatnonzero(wide):
        temperature, top_k, top_p, min_p, uniform = (values[place].item() for values in parameters)
        token_ids[place] = draw_wide(logits[rows[place]], temperature, top_k, top_p, min_p, uniform)
    return token_ids, largest


def _draw_ranked(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    parameters: DrawParameters,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids, and whether the ranks looked at hold all tokens that the filters keep."""
    limited = parameters.top_k > 0
    counts = np.minimum(np.where(limited, parameters.top_k, _FIRST_LOOK), logits.shape[1])
    ranked = rank_most_likely(logits, rows, maxima, counts)
    values = ranked.values.astype(np.float64)
    temperature = parameters.temperature[:, None]
    with np.errstate(invalid="ignore"):
        weights = np.exp((values - values[:, :1]) / temperature)
    cumulated = np.cumsum(weights, axis=1)
    total = cumulated[:, -1].copy()
    by_mass = np.flatnonzero(~limited & (parameters.top_p < 1))
    if by_mass.size:
        total[by_mass] = _weight_sums(logits, rows[by_mass], ranked.values[by_mass, 0], parameters.temperature[by_mass])
    nucleus = np.where(parameters.top_p < 1, parameters.top_p * total, np.inf)

    # Rank r stays while the ranks before it have not reached the nucleus, and it is likely enough itself.
    before = cumulated - weights
    kept = (before < nucleus[:, None]) & (weights >= parameters.min_p[:, None]) & (weights > 0)
    num_kept = kept.sum(axis=1)
    complete = limited | (num_kept < counts) | (counts >= logits.shape[1])
    last = np.maximum(num_kept - 1, 0)
    target = parameters.uniform * cumulated[np.arange(len(rows)), last]
    rank = np.minimum((cumulated <= target[:, None]).sum(axis=1), last)
    return ranked.token_ids[np.arange(len(rows)), rank], complete


def _weight_sums(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    largest: NDArray[np.float32],
    temperature: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Sum of `exp((logit - largest) / temperature)` over each row, `[R]`."""
    sums = group_weights(logits, rows, largest, temperature)
    return np.cumsum(sums, axis=1, dtype=np.float64)[:, -1]


def group_weights(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    largest: NDArray[np.float32],
    temperature: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Sum of `exp((logit - largest) / temperature)` over each group of each row, `[R, num_groups]`."""
    vocab_size = logits.shape[1]
    groups = num_groups(vocab_size)
    whole = vocab_size - vocab_size % groups
    sums = np.empty((len(rows), groups), np.float32)
    weights = np.empty(vocab_size, np.float32)
    with np.errstate(under="ignore", over="ignore"):
        for index, row in enumerate(rows):
            np.subtract(logits[row], largest[index], out=weights)
            if temperature[index] != 1:
                np.multiply(weights, np.float32(1 / temperature[index]), out=weights)
            np.exp(weights, out=weights)
            np.add.reduce(weights[:whole].reshape(-1, groups), axis=0, out=sums[index])
            sums[index, : vocab_size - whole] += weights[whole:]
    return sums


def _draw_from_all(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    parameters: DrawParameters,
) -> NDArray[np.int64]:
    """Draw a group by its weight, then a token of the group by its own."""
    vocab_size = logits.shape[1]
    largest = maxima.max(axis=1)
    index = np.arange(len(rows))
    sums = group_weights(logits, rows, largest, parameters.temperature).astype(np.float64)
    groups = sums.shape[1]
    cumulated = np.cumsum(sums, axis=1)
    target = parameters.uniform * cumulated[:, -1]
    group = np.minimum((cumulated <= target[:, None]).sum(axis=1), _last_positive(sums))
    within = (target - (cumulated[index, group] - sums[index, group])) / sums[index, group]

    members = group[:, None] + np.arange(0, vocab_size, groups)
    inside = members < vocab_size
    members = np.minimum(members, vocab_size - 1)
    values = np.where(inside, logits[rows[:, None], members], -np.inf).astype(np.float64)
    weights = np.exp((values - largest[:, None]) / parameters.temperature[:, None])
    cumulated = np.cumsum(weights, axis=1)
    target = np.clip(within, 0, 1) * cumulated[:, -1]
    member = np.minimum((cumulated <= target[:, None]).sum(axis=1), _last_positive(weights))
    token_ids: NDArray[np.int64] = members[index, member]
    return token_ids


def _last_positive(weights: NDArray[np.float64]) -> NDArray[np.intp]:
    """Index of the last positive weight of each row."""
    last: NDArray[np.intp] = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    return last
