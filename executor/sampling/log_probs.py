"""Log probabilities under the softmax of the raw logits: before temperature, penalties and filters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor.sampling.interface import TopLogProbs
from executor.sampling.ranking import rank_most_likely
from executor.sampling.row_passes import RowPasses


class RawLogProbs:
    """Log probabilities of some rows. The normaliser is summed in float32 by group, over groups in float64."""

    def __init__(self, logits: NDArray[np.float32], rows: NDArray[np.int64], passes: RowPasses) -> None:
        """Take the normalisers of `rows` `[R]` of `logits` `[S, vocab]`; the rows hold finite numbers or -inf."""
        self._logits = logits
        self._rows = rows
        self._passes = passes
        sums = passes.weight_sums(logits, rows, np.ones(len(rows)))
        self._normalizers = sums.shifts + np.log(sums.totals)

    def of(self, token_ids: NDArray[np.int64]) -> list[float]:
        """Of one token of each row."""
        values: list[float] = (self._logits[self._rows, token_ids] - self._normalizers).tolist()
        return values

    def top(self, counts: NDArray[np.int64]) -> list[TopLogProbs]:
        """The `counts[r]` most likely tokens of each row, most likely first, and their log probabilities; fewer
        where the others are impossible."""
        top: list[TopLogProbs] = [[] for _ in self._rows]
        which = np.flatnonzero(counts)
        if which.size:
            rows = self._rows[which]
            ranked = rank_most_likely(self._logits, rows, self._passes.maxima(self._logits, rows), counts[which])
            token_ids = ranked.token_ids.tolist()
            log_probs = (ranked.values - self._normalizers[which, None]).tolist()
            lengths = np.minimum(np.isfinite(ranked.values).sum(axis=1), counts[which]).tolist()
            for place, (row, length) in enumerate(zip(which.tolist(), lengths, strict=True)):
                top[row] = list(zip(token_ids[place][:length], log_probs[place][:length], strict=True))
        return top
