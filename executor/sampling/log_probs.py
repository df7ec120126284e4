"""Log probabilities under the softmax of the raw logits: before temperature, penalties and filters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor.sampling.interface import TopLogProbs
from executor.sampling.ranking import RankedTokens


class RawLogProbs:
    """Log probabilities of rows `first` to `first + R`, some of them ranked."""

    def __init__(
        self,
        first: int,
        normalizers: NDArray[np.float64],
        ranked_rows: NDArray[np.int64],
        ranked: RankedTokens,
    ) -> None:
        """Begin.

        Args:
            first: row number.
            normalizers: `[R]` logarithms of the sums of exponentials.
            ranked_rows: `[K]` row numbers.
            ranked: their most likely tokens, as many as are reported, and raw logits.
        """
        self._first = first
        self.normalizers = normalizers
        self._ranked = ranked
        self._place_of = np.zeros(len(normalizers), np.int64)
        self._place_of[ranked_rows - first] = np.arange(len(ranked_rows))
        self._lengths = np.zeros(len(normalizers), np.int64)
        self._lengths[ranked_rows - first] = np.isfinite(ranked.values).sum(axis=1)

    def of(self, logits: NDArray[np.float32], rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> list[float]:
        """Of one token of each of `rows` of the raw `logits` `[S, vocab]`."""
        values: list[float] = (logits[rows, token_ids] - self.normalizers[rows - self._first]).tolist()
        return values

    def top(self, rows: NDArray[np.int64]) -> list[TopLogProbs]:
        """The most likely tokens of rows, most likely first, and their log probabilities; none that is impossible,
        and none of a row that is not ranked."""
        if len(self._ranked.values) == 0:
            return [[] for _ in rows]
        places = self._place_of[rows - self._first]
        log_probs = (self._ranked.values[places] - self.normalizers[rows - self._first][:, None]).tolist()
        token_ids = self._ranked.token_ids[places].tolist()
        lengths = self._lengths[rows - self._first].tolist()
        return [
            list(zip(ids[:length], of_ids[:length], strict=True))
            for ids, of_ids, length in zip(token_ids, log_probs, lengths, strict=True)
        ]
