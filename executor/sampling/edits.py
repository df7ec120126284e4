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
        self._biased: list[NDArray[np.int64]] = []
        self._biases: list[NDArray[np.float32]] = []
        self._penalized: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._banned: list[int] = []
        self._replaced: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        """What was there before, by place in the flat logits, oldest first."""

    def add(self, row: int, token_ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add `values[n]` to the logits of `token_ids[n]`."""
        self._biased.append(token_ids + row * self._vocab_size)
        self._biases.append(values)

    def penalize(
        self,
        row: int,
        token_ids: NDArray[np.int64],
        counts: NDArray[np.int64],
        repetition: float,
        presence: float,
        frequency: float,
    ) -> None:
        """Divide positive logits by `repetition` and multiply others with it; then subtract `presence` where the
        count is not 0, and `frequency` times the count."""
        token_ids += row * self._vocab_size
        self._penalized.append(token_ids)
        self._counts.append(counts)
        self._penalties.append((repetition, presence, frequency))

    def ban(self, row: int, token_ids: list[int]) -> None:
        """Set logits to -inf."""
        begin = row * self._vocab_size
        self._banned += [begin + token_id for token_id in token_ids]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Make the edits in `logits` `[S, vocab]`, C-contiguous."""
        flat = logits.reshape(-1)
        if self._biased:
            places = np.concatenate(self._biased)
            self._replace(flat, places, flat[places] + np.concatenate(self._biases))
        if self._penalized:
            lengths = [len(places) for places in self._penalized]
            repetition, presence, frequency = np.repeat(np.array(self._penalties, np.float32).T, lengths, axis=1)
            counts = np.concatenate(self._counts)
            places = np.concatenate(self._penalized)
            values = flat[places]
            values = np.where(values < 0, values * repetition, values / repetition)
            self._replace(flat, places, values - (presence * (counts > 0) + frequency * counts).astype(np.float32))
        if self._banned:
            places = np.array(self._banned, np.int64)
            self._replace(flat, places, np.full(len(places), -np.inf, np.float32))

    def undo(self, logits: NDArray[np.float32]) -> None:
        """Put back what `apply` replaced."""
        flat = logits.reshape(-1)
        for places, values in reversed(self._replaced):
            flat[places] = values

    def _replace(self, flat: NDArray[np.float32], places: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self._replaced.append((places, flat[places]))
        flat[places] = values
