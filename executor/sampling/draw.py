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

from executor.sampling.known_maxima import KnownMaxima
from executor.sampling.ranking import RankedTokens, rank_most_likely
from executor.sampling.row_passes import RowPasses
from executor.sampling.wide_draw import draw_wide

_LOOKS = (32, 256)
"""Ranks looked at first, and next, where only top-p or min-p limits them; few distributions keep more tokens."""

_MOST_RANKS = 256
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
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    parameters: DrawParameters,
    passes: RowPasses,
    known: KnownMaxima | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token for each row.

    Args:
        logits: `[S, vocab]`, C-contiguous. -inf excludes a token.
        rows: `[R]`.
        parameters: of each row.
        passes: for this vocabulary.
        known: group maxima that need not be computed.

    Returns:
        Token ids `[R]`, and `[R]` a logit of each row that is finite, or the row's largest where that is not: NaN
        where it holds one, inf, or -inf where it holds nothing else. Then the token id means nothing.
    """
    token_ids = np.zeros(len(rows), np.int64)
    levels = np.zeros(len(rows), np.float32)
    everything = (parameters.top_k == 0) & (parameters.top_p >= 1) & (parameters.min_p <= 0)
    which = np.flatnonzero(everything)
    if which.size:
        token_ids[which], levels[which] = _draw_from_all(logits, rows[which], parameters.take(which), passes)
    which = np.flatnonzero(~everything)
    if which.size:
        token_ids[which], levels[which] = _draw_filtered(logits, rows[which], parameters.take(which), passes, known)
    return token_ids, levels


def _draw_filtered(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    parameters: DrawParameters,
    passes: RowPasses,
    known: KnownMaxima | None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """`draw` for rows with a filter."""
    token_ids = np.zeros(len(rows), np.int64)
    maxima = passes.maxima(logits, rows) if known is None else known.of(logits, rows, passes)
    largest = maxima.coarse.max(axis=1)
    valid = np.isfinite(largest)
    limited = parameters.top_k > 0
    total = np.full(len(rows), np.nan)
    """Of the weights, where top-p is of all tokens."""
    by_mass = np.flatnonzero(valid & ~limited & (parameters.top_p < 1))
    if by_mass.size:
        temperature = parameters.temperature[by_mass]
        sums = passes.weight_sums(logits, rows[by_mass], temperature)
        total[by_mass] = sums.totals * np.exp(sums.shifts - largest[by_mass] / temperature)

    wide = valid & (parameters.top_k > _MOST_RANKS)
    pending = valid & ~wide
    for look in _LOOKS:
        which = np.flatnonzero(pending)
        if which.size == 0:
            break
        counts = np.minimum(np.where(limited[which], parameters.top_k[which], look), passes.vocab_size)
        some = maxima if len(which) == len(rows) else maxima.take(which)
        ranked = rank_most_likely(logits, rows[which], some, counts)
        token_ids[which], complete = _draw_ranked(ranked, counts, parameters.take(which), total[which])
        pending[which] = ~(complete | (counts == passes.vocab_size))
    for place in np.flatnonzero(wide | pending):
        temperature, top_k, top_p, min_p, uniform = (values[place].item() for values in parameters)
        token_ids[place] = draw_wide(logits[rows[place]], temperature, top_k, top_p, min_p, uniform)
    return token_ids, largest


def _draw_ranked(
    ranked: RankedTokens, counts: NDArray[np.int64], parameters: DrawParameters, total: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw from the `counts[r]` most likely tokens of each row; `total` is NaN where they are all there are.

    Returns token ids, and whether the filters keep no token beyond those.
    """
    values = ranked.values.astype(np.float64)
    weights = np.exp((values - values[:, :1]) / parameters.temperature[:, None])
    cumulated = np.cumsum(weights, axis=1)
    total = np.where(np.isnan(total), cumulated[:, -1], total)
    nucleus = np.where(parameters.top_p < 1, parameters.top_p * total, np.inf)

    # Rank r stays while the ranks before it have not reached the nucleus, and it is likely enough itself.
    before = cumulated - weights
    kept = (before < nucleus[:, None]) & (weights >= parameters.min_p[:, None]) & (weights > 0)
    num_kept = kept.sum(axis=1)
    complete = (parameters.top_k > 0) | (num_kept < counts)
    index = np.arange(len(counts))
    last = np.maximum(num_kept - 1, 0)
    target = parameters.uniform * cumulated[index, last]
    rank = np.minimum((cumulated <= target[:, None]).sum(axis=1), last)
    return ranked.token_ids[index, rank], complete


def _draw_from_all(
    logits: NDArray[np.float32], rows: NDArray[np.int64], parameters: DrawParameters, passes: RowPasses
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """`draw` for rows without a filter: a group by its weight, then a token of the group by its own."""
    index = np.arange(len(rows))
    sums = passes.weight_sums(logits, rows, parameters.temperature)
    num_groups = sums.groups.shape[1]
    with np.errstate(all="ignore"):
        cumulated = np.cumsum(sums.groups, axis=1)
        target = parameters.uniform * cumulated[:, -1]
        group = np.minimum((cumulated <= target[:, None]).sum(axis=1), _last_positive(sums.groups))
        within = (target - (cumulated[index, group] - sums.groups[index, group])) / sums.groups[index, group]

        members = group[:, None] + np.arange(0, passes.vocab_size, num_groups)
        inside = members < passes.vocab_size
        members = np.minimum(members, passes.vocab_size - 1)
        values = np.where(inside, logits[rows[:, None], members], -np.inf).astype(np.float64)
        weights = np.exp(values / parameters.temperature[:, None] - sums.shifts[:, None])
        cumulated = np.cumsum(weights, axis=1)
        target = np.clip(within, 0, 1) * cumulated[:, -1]
        member = np.minimum((cumulated <= target[:, None]).sum(axis=1), _last_positive(weights))
    token_ids: NDArray[np.int64] = members[index, member]
    levels = np.zeros(len(rows), np.float32)
    for place in np.flatnonzero(~(np.isfinite(sums.totals) & (sums.totals > 0))):
        levels[place] = logits[rows[place]].max()
    return token_ids, levels


def _last_positive(weights: NDArray[np.float64]) -> NDArray[np.intp]:
    """Index of the last positive weight of each row."""
    last: NDArray[np.intp] = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    return last
