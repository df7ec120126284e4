"""Group maxima of edited rows, brought up to date from those of the raw rows instead of computed anew."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.row_passes import Maxima, RowPasses


class KnownMaxima(NamedTuple):
    """Of rows `first` to `first + R`."""

    first: int
    maxima: Maxima
    is_known: NDArray[np.bool_]
    """[R]"""

    def of(self, logits: NDArray[np.float32], rows: NDArray[np.int64], passes: RowPasses) -> Maxima:
        """Of any `rows` of `logits` `[S, vocab]`; those that are not known are computed."""
        places = rows - self.first
        known = (places >= 0) & (places < len(self.is_known))
        known[known] = self.is_known[places[known]]
        if known.all():
            return self.maxima if len(rows) == len(self.is_known) else self.maxima.take(places)
        fine = np.empty((len(rows), passes.fine_groups), np.float32)
        fine[known] = self.maxima.fine[places[known]]
        fine[~known] = passes.maxima(logits, rows[~known]).fine
        return Maxima.of(fine)
