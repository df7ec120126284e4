"""Changes to a few logits of many rows: gathered before there are logits, then made all at once.

They are made in the order bias, penalties, bans, whatever the order they were noted in, and can be taken back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class EditNotes:
    """Gathers the edits of one step: without its logits, so that this can be done while they are computed.

    Within a row each kind names a token at most once, except bans.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biased = _Tokens()
        self._biases: list[NDArray[np.float32]] = []
        self._penalized = _Tokens()
        self._counts: list[NDArray[np.int64]] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._banned: list[int] = []

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

    def arrange(self) -> LogitsEdits:
        """All that was noted, ready to be made."""
        biases = penalties = bans = None
        if self._biases:
            biases = _Biases(self._biased.places(self._vocab_size), np.concatenate(self._biases))
        if self._counts:
            counts = np.concatenate(self._counts)
            repetition, presence, frequency = np.repeat(
                np.array(self._penalties, np.float32).T, self._penalized.lengths, axis=1
            )
            subtracted = presence * (counts > 0), frequency * counts.astype(np.float32)
            penalties = _Penalties(self._penalized.places(self._vocab_size), repetition, *subtracted)
        if self._banned:
            bans = np.array(self._banned, np.int64)
        return LogitsEdits(self._vocab_size, biases, penalties, bans)


class _Biases(NamedTuple):
    places: NDArray[np.int64]
    """[n] in the flat logits"""
    values: NDArray[np.float32]
    """[n]"""


class _Penalties(NamedTuple):
    places: NDArray[np.int64]
    """[n] in the flat logits"""
    repetition: NDArray[np.float32]
    """[n]"""
    presence: NDArray[np.float32]
    """[n] to be subtracted"""
    frequency: NDArray[np.float32]
    """[n] to be subtracted"""


class LogitsEdits:
    """The edits of one step, to be made in its logits and taken back."""

    def __init__(
        self, vocab_size: int, biases: _Biases | None, penalties: _Penalties | None, bans: NDArray[np.int64] | None
    ) -> None:
        self._vocab_size = vocab_size
        self._biases = biases
        self._penalties = penalties
        self._bans = bans
        self._replaced: list[_Replaced] = []
        """Oldest first."""

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Make the edits in `logits` `[S, vocab]`, C-contiguous."""
        flat = logits.reshape(-1)
        if self._biases is not None:
            old = flat[self._biases.places]
            self._replace(flat, self._biases.places, old, old + self._biases.values)
        if self._penalties is not None:
            places, repetition, presence, frequency = self._penalties
            old = flat[places]
            values = np.where(old < 0, old * repetition, old / repetition)
            values -= presence
            values -= frequency
            self._replace(flat, places, old, values)
        if self._bans is not None:
            excluded = np.full(len(self._bans), -np.inf, np.float32)
            self._replace(flat, self._bans, flat[self._bans], excluded)

    def undo(self, logits: NDArray[np.float32]) -> None:
        """Put back what `apply` replaced."""
        flat = logits.reshape(-1)
        for places, old, _ in reversed(self._replaced):
            flat[places] = old

    def refresh(self, logits: NDArray[np.float32], fine: NDArray[np.float32], first: int) -> None:
        """Make maxima of the rows as they were before `apply` those of the rows as they are.

        A group's maximum is another one only if the token that held it was changed, or one rose above it; such groups
        are looked at again.

        Args:
            logits: what was given to `apply`.
            fine: `[R, groups]` maxima of rows `first` to `first + R`, without NaN; token t is in group `t % groups`.
            first: row number.
        """
        num_rows, groups = fine.shape
        maxima = fine.reshape(-1)
        changed = []
        for places, old, new in self._replaced:
            rows = places // self._vocab_size
            token_ids = places - rows * self._vocab_size
            rows -= first
            group_of = rows * groups + (token_ids - token_ids // groups * groups)
            if num_rows < len(logits):
                inside = (rows >= 0) & (rows < num_rows)
                group_of, old, new = group_of[inside], old[inside], new[inside]
            before = maxima[group_of]
            changed.append(group_of[(old >= before) | (new > before)])
        if changed:
            group_of = np.concatenate(changed)
            rows = group_of // groups
            members = np.arange(0, self._vocab_size, groups)[:, None] + (group_of - rows * groups)
            # The last member of some groups would lie beyond the vocabulary; the first one stands in.
            members[-1] = np.where(members[-1] < self._vocab_size, members[-1], members[0])
            members += (rows + first) * self._vocab_size
            maxima[group_of] = logits.reshape(-1).take(members).max(axis=0)

    def _replace(
        self,
        flat: NDArray[np.float32],
        places: NDArray[np.int64],
        old: NDArray[np.float32],
        new: NDArray[np.float32],
    ) -> None:
        self._replaced.append(_Replaced(places, old, new))
        flat[places] = new


class _Replaced(NamedTuple):
    places: NDArray[np.int64]
    """[n] in the flat logits"""
    old: NDArray[np.float32]
    """[n]"""
    new: NDArray[np.float32]
    """[n]"""


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
