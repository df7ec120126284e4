"""Changes to a few logits of many rows, gathered first and then made all at once.

They are made in the order bias, penalties, bans, whatever the order they were noted in, and can be taken back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class LogitsEdits:
    """The edits of one step. Within a row each kind names a token at most once, except bans."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biased = _Tokens()
        self._biases: list[NDArray[np.float32]] = []
        self._penalized = _Tokens()
        self._counts: list[NDArray[np.int64]] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._banned: list[int] = []
        self._replaced: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        """What was there before, by place in the flat logits, oldest first."""

    def add(self, row: int, token_ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add `values[n]` to the logits of `token_ids[n]`."""
        self._biased.note(row, token_ids)
        self._biases.append(values)

    def penalize(
        self,
        row: int,
        token_ids: NDArray[np.int64],
        counts: NDArray[np.int64],
        penalties: tuple[float, float, float],
    ) -> None:
        """By (repetition, presence, frequency) penalties: divide positive logits by the first and multiply others
        with it; subtract the second where the count is not 0; subtract the third times the count."""
        self._penalized.note(row, token_ids)
        self._counts.append(counts)
        self._penalties.append(penalties)

    def ban(self, row: int, token_ids: list[int]) -> None:
        """Set logits to -inf."""
        begin = row * self._vocab_size
        self._banned += [begin + token_id for token_id in token_ids]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Make the edits in `logits` `[S, vocab]`, C-contiguous."""
        flat = logits.reshape(-1)
        if self._biases:
            places = self._biased.places(self._vocab_size)
            old = flat[places]
            self._replace(flat, places, old, old + np.concatenate(self._biases))
        if self._counts:
            places = self._penalized.places(self._vocab_size)
            old = flat[places]
            counts = np.concatenate(self._counts)
            repetition, presence, frequency = np.repeat(
                np.array(self._penalties, np.float32).T, self._penalized.lengths, axis=1
            )
            values = np.where(old < 0, old * repetition, old / repetition)
            values -= presence * (counts > 0)
            values -= frequency * counts.astype(np.float32)
            self._replace(flat, places, old, values)
        if self._banned:
            places = np.array(self._banned, np.int64)
            self._replace(flat, places, flat[places], np.float32(-np.inf))

    def undo(self, logits: NDArray[np.float32]) -> None:
        """Put back what `apply` replaced."""
        flat = logits.reshape(-1)
        for places, values in reversed(self._replaced):
            flat[places] = values

    def _replace(
        self,
        flat: NDArray[np.float32],
        places: NDArray[np.int64],
        old: NDArray[np.float32],
        new: NDArray[np.float32] | np.float32,
    ) -> None:
        self._replaced.append((places, old))
        flat[places] = new


class _Tokens:
    """Tokens of some rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[NDArray[np.int64]] = []

    def note(self, row: int, token_ids: NDArray[np.int64]) -> None:
        self._rows.append(row)
        self._token_ids.append(token_ids)

    @property
    def lengths(self) -> list[int]:
        return [len(token_ids) for token_ids in self._token_ids]

    def places(self, vocab_size: int) -> NDArray[np.int64]:
        """In the flat logits, one after the other."""
        begins = np.array(self._rows, np.int64) * vocab_size
        return np.concatenate(self._token_ids) + np.repeat(begins, self.lengths)
