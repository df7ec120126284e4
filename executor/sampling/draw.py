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

from executor.sampling.ranking import RankedTokens, group_maxima, num_groups, rank_above, rank_most_likely

_FIRST_LOOK = 128
"""Ranks looked at first where only top-p or min-p limits them; few distributions need more."""


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
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw one token for each row.

    Args:
        logits: `[S, vocab]`, C-contiguous. -inf excludes a token.
        rows: `[R]`.
        parameters: of each row.

    Returns:
        Token ids `[R]`, and `[R]` whether the row could be drawn from: False where it holds a NaN or +inf, or
        nothing but -inf.
    """
    maxima = group_maxima(logits, rows)
    largest = maxima.max(axis=1)
    valid = np.isfinite(largest)
    token_ids = np.zeros(len(rows), np.int64)
    everything = (parameters.top_k == 0) & (parameters.top_p >= 1) & (parameters.min_p <= 0)
    for select, draw_rows in ((valid & ~everything, _draw_ranked), (valid & everything, _draw_from_all)):
        which = np.flatnonzero(select)
        if which.size:
            token_ids[which] = draw_rows(logits, rows[which], maxima[which], parameters.take(which))
    return token_ids, valid


def _draw_ranked(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    parameters: DrawParameters,
) -> NDArray[np.int64]:
    vocab_size = logits.shape[1]
    limited = parameters.top_k > 0
    counts = np.minimum(np.where(limited, parameters.top_k, _FIRST_LOOK), vocab_size)
    ranked = rank_most_likely(logits, rows, maxima, counts)
    token_ids, reached = _draw_from_ranks(logits, rows, ranked, counts, parameters)
    again = np.flatnonzero(~reached)
    if again.size:
        rest = parameters.take(again)
        ranked = rank_above(logits, rows[again], maxima[again], _reach(logits, rows[again], maxima[again], rest))
        counts = np.full(len(again), vocab_size)
        token_ids[again], _ = _draw_from_ranks(logits, rows[again], ranked, counts, rest)
    return token_ids


def _draw_from_ranks(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    ranked: RankedTokens,
    counts: NDArray[np.int64],
    parameters: DrawParameters,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids, and whether the ranks hold all tokens that the filters keep."""
    values = ranked.values.astype(np.float64)
    temperature = parameters.temperature[:, None]
    with np.errstate(invalid="ignore"):
        weights = np.exp((values - values[:, :1]) / temperature)
    cumulated = np.cumsum(weights, axis=1)
    total = cumulated[:, -1].copy()
    limited = parameters.top_k > 0
    by_mass = np.flatnonzero(~limited & (parameters.top_p < 1))
    if by_mass.size:
        total[by_mass] = _weight_sums(logits, rows[by_mass], ranked.values[by_mass, 0], parameters.temperature[by_mass])
    nucleus = np.where(parameters.top_p < 1, parameters.top_p * total, np.inf)

    # Rank r stays while the ranks before it have not reached the nucleus, and it is likely enough itself.
    before = cumulated - weights
    kept = (before < nucleus[:, None]) & (weights >= parameters.min_p[:, None]) & (weights > 0)
    num_kept = kept.sum(axis=1)
    reached = limited | (num_kept < counts) | (counts >= logits.shape[1])
    last = np.maximum(num_kept - 1, 0)
    target = parameters.uniform * cumulated[np.arange(len(rows)), last]
    rank = np.minimum((cumulated <= target[:, None]).sum(axis=1), last)
    return ranked.token_ids[np.arange(len(rows)), rank], reached


def _reach(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    parameters: DrawParameters,
) -> NDArray[np.float32]:
    """A logit below which no token is kept, for rows with top-p or min-p.

    Tokens of weight at most `(1 - top_p) * total / vocab` weigh at most `(1 - top_p) * total` together: the nucleus
    is complete without them.
    """
    largest = maxima.max(axis=1)
    total = _weight_sums(logits, rows, largest, parameters.temperature)
    weight = np.maximum((1 - parameters.top_p) * total / logits.shape[1], parameters.min_p)
    with np.errstate(divide="ignore"):
        reach = largest + parameters.temperature * np.log(weight)
    # A rounding below, never above.
    below: NDArray[np.float32] = np.nextafter(reach.astype(np.float32), np.float32(-np.inf))
    return below


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
