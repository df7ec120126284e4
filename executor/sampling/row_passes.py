"""The passes over whole rows of logits that sampling needs: argmax, group maxima, sums of exponentials.

Everything else looks at a few tokens of a row. Token t belongs to group `t % num_groups`, so that a pass over groups is
a reduction over contiguous memory:

```
row       | t0  t1  t2  t3 | t4  t5  t6  t7 | t8  t9 |       num_groups = 4
group 1         ^                ^               ^           maxima[1] = max(t1, t5, t9)
```

Rows are shared out to threads; numpy releases the interpreter lock in them. What comes out for a row depends on that
row alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FINE_GROUPS = 4096
_COARSE_GROUPS = 512
_SUM_GROUPS = 512
_MOST_THREADS = 8
_WORTH_A_THREAD = 400_000
"""Logits that a thread should have to itself: below, handing over costs more than it saves."""

_ROWS_A_BLOCK = 4
"""Few enough to stay in the second-level cache, enough for threads not to wait for the interpreter lock."""

_SMALLEST_TOTAL, _LARGEST_TOTAL = 1e-20, 1e30
"""Between these, a sum of float32 exponentials has lost nothing to underflow or overflow."""


class Maxima(NamedTuple):
    """Of R rows, NaN where a member is."""

    fine: NDArray[np.float32]
    """[R, fine groups]"""
    coarse: NDArray[np.float32]
    """[R, coarse groups] of the fine groups: fine group g belongs to coarse group `g % coarse groups`."""

    @classmethod
    def of(cls, fine: NDArray[np.float32]) -> Maxima:
        """With the coarse groups' maxima."""
        return cls(fine, _coarse(fine))

    def take(self, which: NDArray[np.int64]) -> Maxima:
        return Maxima(self.fine[which], self.coarse[which])


class WeightSums(NamedTuple):
    """Sums of `exp(logit / temperature - shift)` over groups of R rows."""

    groups: NDArray[np.float64]
    """[R, sum groups]"""
    totals: NDArray[np.float64]
    """[R], over all groups; 0, NaN or infinite where the row has no finite maximum."""
    shifts: NDArray[np.float64]
    """[R]"""


class RowPasses:
    """Passes over rows of `vocab_size` logits. One caller at a time."""

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """Prepare.

        Args:
            vocab_size: logits of a row.
            num_threads: at most so many; `None`: as many as there are processors, up to eight.
        """
        self.vocab_size = vocab_size
        self.fine_groups = min(vocab_size, _FINE_GROUPS)
        self.sum_groups = min(vocab_size, _SUM_GROUPS)
        processors = len(os.sched_getaffinity(0))
        self._num_threads = max(1, min(processors, _MOST_THREADS) if num_threads is None else num_threads)
        self._threads = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="sampler")
        self._scratch = np.empty((self._num_threads, _ROWS_A_BLOCK, vocab_size), np.float32)

    def most_likely(
        self, logits: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The token with the largest logit of each of `rows` `[R]`, the first of equals, and that logit; NaN where the
        row holds one."""
        token_ids = np.empty(len(rows), np.int64)
        read = _reader(logits, rows)

        def find(begin: int, end: int, _: NDArray[np.float32]) -> None:
            read(begin, end).argmax(axis=1, out=token_ids[begin:end])

        self._share_out(len(rows), find)
        return token_ids, logits[rows, token_ids]

    def maxima(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> Maxima:
        """Group maxima of `rows` `[R]` of `logits` `[S, vocab]`."""
        groups = self.fine_groups
        whole = self.vocab_size - self.vocab_size % groups
        fine = np.empty((len(rows), groups), np.float32)
        read = _reader(logits, rows)

        def reduce_rows(begin: int, end: int, _: NDArray[np.float32]) -> None:
            block = read(begin, end)[:, :whole]
            np.maximum.reduce(block.reshape(end - begin, -1, groups), axis=1, out=fine[begin:end])

        self._share_out(len(rows), reduce_rows)
        if whole < self.vocab_size:
            rest = fine[:, : self.vocab_size - whole]
            np.maximum(rest, logits[rows, whole:], out=rest)
        return Maxima.of(fine)

    def weight_sums(
        self, logits: NDArray[np.float32], rows: NDArray[np.int64], temperature: NDArray[np.float64]
    ) -> WeightSums:
        """Group sums of `rows` `[R]`, each at its own temperature `[R]`."""
        scale = (1 / temperature).astype(np.float32)
        sums = self._exponential_sums(logits, rows, scale, None)
        totals = totals_of(sums)
        shifts = np.zeros(len(rows))
        # Most rows need no shift for their exponentials to be well in range. The others are done again, with one.
        again = np.flatnonzero(~is_exact(totals))
        if again.size:
            largest = logits[rows[again]].max(axis=1)
            finite = np.isfinite(largest)
            again, largest = again[finite], largest[finite]
            sums[again] = self._exponential_sums(logits, rows[again], scale[again], largest)
            totals[again] = totals_of(sums[again])
            shifts[again] = largest / temperature[again]
        return WeightSums(sums.astype(np.float64), totals, shifts)

    def _exponential_sums(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        scale: NDArray[np.float32],
        largest: NDArray[np.float32] | None,
    ) -> NDArray[np.float32]:
        """Sums of `exp((logit - largest) * scale)` over groups, `[R, sum groups]`; nothing is subtracted for `None`."""
        groups = self.sum_groups
        whole = self.vocab_size - self.vocab_size % groups
        sums = np.empty((len(rows), groups), np.float32)
        read = _reader(logits, rows)

        def sum_rows(begin: int, end: int, scratch: NDArray[np.float32]) -> None:
            exponents = read(begin, end)
            with np.errstate(all="ignore"):
                if largest is not None:
                    exponents = np.subtract(exponents, largest[begin:end, None], out=scratch)
                if (scale[begin:end] != 1).any():
                    exponents = np.multiply(exponents, scale[begin:end, None], out=scratch)
                np.exp(exponents, out=scratch)
                np.add.reduce(scratch[:, :whole].reshape(end - begin, -1, groups), axis=1, out=sums[begin:end])
                sums[begin:end, : self.vocab_size - whole] += scratch[:, whole:]

        self._share_out(len(rows), sum_rows)
        return sums

    def _share_out(self, num_rows: int, work: Callable[[int, int, NDArray[np.float32]], None]) -> None:
        """Do `work(begin, end, scratch [end - begin, vocab])` for blocks that cover all rows, in as many threads as are
        worth it."""
        pieces = min(self._num_threads, max(1, num_rows * self.vocab_size // _WORTH_A_THREAD))
        bounds = [num_rows * piece // pieces for piece in range(pieces + 1)]

        def do(piece: int) -> None:
            for begin in range(bounds[piece], bounds[piece + 1], _ROWS_A_BLOCK):
                end = min(begin + _ROWS_A_BLOCK, bounds[piece + 1])
                work(begin, end, self._scratch[piece, : end - begin])

        others = [self._threads.submit(do, piece) for piece in range(1, pieces)]
        do(0)
        for other in others:
            other.result()


def _reader(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> Callable[[int, int], NDArray[np.float32]]:
    """Reads blocks of `rows`: without a copy where these follow each other."""
    if (np.diff(rows) == 1).all():
        first = int(rows[0]) if len(rows) else 0
        return lambda begin, end: logits[first + begin : first + end]
    return lambda begin, end: logits[rows[begin:end]]


def _coarse(fine: NDArray[np.float32]) -> NDArray[np.float32]:
    num_rows, width = fine.shape
    groups = min(width, _COARSE_GROUPS)
    whole = width - width % groups
    coarse: NDArray[np.float32] = fine[:, :whole].reshape(num_rows, -1, groups).max(axis=1)
    if whole < width:
        rest = coarse[:, : width - whole]
        np.maximum(rest, fine[:, whole:], out=rest)
    return coarse


def is_exact(totals: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether sums of exponentials without a shift have lost nothing; not for NaN."""
    exact: NDArray[np.bool_] = (totals > _SMALLEST_TOTAL) & (totals < _LARGEST_TOTAL)
    return exact


def totals_of(sums: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over groups. Converted first, so that rows lie whole in memory and each is added up by itself, in one order."""
    with np.errstate(all="ignore"):
        totals: NDArray[np.float64] = sums.astype(np.float64).sum(axis=1)
    return totals
