"""The sampler: logits of a whole step in, tokens of every sequence out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.counter_random import uniforms
from executor.sampling.draw import DrawParameters, draw
from executor.sampling.edits import LogitsEdits
from executor.sampling.errors import InvalidLogitsError, NoTokenLeftError, SamplingError
from executor.sampling.interface import (
    SampledRows,
    SampledSequence,
    SamplingSpec,
)
from executor.sampling.log_probs import RawLogProbs
from executor.sampling.row_edits import Edited, RowEdits
from executor.sampling.slots import Needs, Slots


class _Step(NamedTuple):
    """The rows of a step, in the order of its sequences."""

    sequences: Sequence[SampledRows]
    slots: list[int]
    """Of each sequence."""
    needs: int
    """Of all sequences together."""
    rows: NDArray[np.int64]
    """[R] row numbers in the logits."""
    parameters: NDArray[Any]
    """[R] the slots' records."""
    positions: NDArray[np.int64]
    """[R] index in the sequence of the token that is drawn."""


class Sampler:
    """Draws the next tokens of the sequences it was told of. Not thread-safe: one caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.vocab_size = vocab_size
        self._slots = Slots()
        self._row_edits = RowEdits(vocab_size)

    def open(self, request_id: int, sampling: SamplingSpec) -> None:
        """Make a sequence known.

        Raises:
            InvalidRequestError: a field of `sampling` is wrong for this vocabulary.
            ValueError: `request_id` is open already.
        """
        sampling.validate(self.vocab_size)
        self._slots.open(request_id, sampling)

    def close(self, request_id: int) -> None:
        """Forget a sequence; one that is not open is left alone."""
        self._slots.close(request_id)

    def sample(self, logits: NDArray[np.float32], sequences: Sequence[SampledRows]) -> list[SampledSequence]:
        """Draw the tokens of a step.

        Args:
            logits: float32 `[S, vocab_size]`. Scratch: what it holds afterwards is undefined.
            sequences: whose rows they are; each row belongs to at most one of them.

        Returns:
            One entry for each of `sequences`, in order. A sequence that cannot be drawn has an `error`; it never
            affects the others.

        Raises:
            ValueError: shapes or row numbers that do not fit together.
            KeyError: a sequence that is not open.
        """
        if not sequences:
            return []
        logits = self._checked(logits, sequences)
        step = self._lay_out(sequences)
        edits = LogitsEdits(self.vocab_size)
        top_p: NDArray[np.float64] | None = None
        raw_rows: dict[int, NDArray[np.float32]] = {}
        errors: dict[int, SamplingError] = {}
        if step.needs & Needs.STATE:
            if step.needs & Needs.RAW_LOGITS and step.needs & Needs.ROW_EDITS:
                raw_rows = self._keep_raw_rows(logits, step)
            top_p, errors = self._edit(logits, step, edits)

        token_ids, largest = self._draw(logits, step, top_p)
        sampled = self._accepted(step, token_ids.tolist(), largest.tolist(), errors)
        if step.needs & Needs.RAW_LOGITS:
            edits.undo(logits)
            for row, raw in raw_rows.items():
                logits[row] = raw
            self._report(logits, step, sampled)
        return sampled

    def _checked(self, logits: NDArray[np.float32], sequences: Sequence[SampledRows]) -> NDArray[np.float32]:
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or logits.dtype != np.float32:
            raise ValueError(
                f"logits are {logits.dtype} {list(logits.shape)}; they must be float32 [rows, {self.vocab_size}]"
            )
        for sequence in sequences:
            end = sequence.first_row + sequence.num_rows
            if sequence.num_rows != 1 + len(sequence.draft_token_ids) or sequence.first_row < 0 or end > len(logits):
                raise ValueError(
                    f"request {sequence.request_id} has rows {sequence.first_row} to {end} of {len(logits)} for "
                    f"{len(sequence.draft_token_ids)} drafts; it needs one row more than drafts"
                )
        return np.require(logits, requirements=["C", "W"])

    def _lay_out(self, sequences: Sequence[SampledRows]) -> _Step:
        slots = [self._slots.slot_of(sequence.request_id) for sequence in sequences]
        records = self._slots.table[slots]
        num_rows = np.array([sequence.num_rows for sequence in sequences])
        starts = np.array([(sequence.first_row, len(sequence.token_ids)) for sequence in sequences])
        if num_rows.max() > 1:
            ends = np.cumsum(num_rows)
            steps = np.arange(ends[-1]) - np.repeat(ends - num_rows, num_rows)
            records = np.repeat(records, num_rows)
            starts = np.repeat(starts, num_rows, axis=0) + steps[:, None]
        needs = int(np.bitwise_or.reduce(records["needs"]))
        return _Step(sequences, slots, needs, starts[:, 0], records, starts[:, 1])

    def _keep_raw_rows(self, logits: NDArray[np.float32], step: _Step) -> dict[int, NDArray[np.float32]]:
        """Copies of the rows that are edited as a whole and wanted raw afterwards."""
        needs = step.parameters["needs"]
        wanted = ((needs & Needs.RAW_LOGITS) != 0) & ((needs & Needs.ROW_EDITS) != 0)
        return {row: logits[row].copy() for row in step.rows[wanted].tolist()}

    def _edit(
        self, logits: NDArray[np.float32], step: _Step, edits: LogitsEdits
    ) -> tuple[NDArray[np.float64], dict[int, SamplingError]]:
        """Make all edits. Returns `top_p` of each row, and errors by sequence."""
        top_p = step.parameters["top_p"].copy()
        needs = self._slots.table["needs"][step.slots].tolist()
        errors: dict[int, SamplingError] = {}
        by_row: list[Edited] = []
        place = 0
        for index, sequence in enumerate(step.sequences):
            if needs[index] & Needs.STATE:
                state = self._slots.state(step.slots[index])
                try:
                    state.follow(sequence.token_ids)
                except SamplingError as error:
                    errors[index] = error
                if needs[index] & Needs.ROW_EDITS and index not in errors:
                    by_row.append(Edited(index, sequence, state))
                if needs[index] & Needs.EDITS:
                    for row, draft in enumerate((*sequence.draft_token_ids, None)):
                        state.collect(sequence.first_row + row, edits)
                        if state.top_p is not None:
                            top_p[place + row] = state.top_p
                        if draft is not None:
                            state.push(draft)
                    for _ in sequence.draft_token_ids:
                        state.pop()
            place += sequence.num_rows

        errors |= self._row_edits.process(logits, by_row)
        edits.apply(logits)
        errors |= self._row_edits.mask(logits, [edited for edited in by_row if edited.place not in errors])
        return top_p, errors

    def _draw(
        self, logits: NDArray[np.float32], step: _Step, top_p: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token for each row, and the row's largest logit (NaN where one is)."""
        if not step.needs & Needs.DRAW:
            return _most_likely(logits, step.rows)
        token_ids = np.empty(len(step.rows), np.int64)
        largest = np.empty(len(step.rows), np.float32)
        drawn = (step.parameters["needs"] & Needs.DRAW) != 0
        which = np.flatnonzero(~drawn)
        token_ids[which], largest[which] = _most_likely(logits, step.rows[which])
        which = np.flatnonzero(drawn)
        chosen = step.parameters[which]
        parameters = DrawParameters(
            temperature=chosen["temperature"],
            top_k=chosen["top_k"],
            top_p=chosen["top_p"] if top_p is None else top_p[which],
            min_p=chosen["min_p"],
            uniform=uniforms(chosen["stream"], step.positions[which]),
        )
        token_ids[which], largest[which] = draw(logits, step.rows[which], parameters)
        return token_ids, largest

    def _accepted(
        self, step: _Step, token_ids: list[int], largest: list[float], errors: dict[int, SamplingError]
    ) -> list[SampledSequence]:
        """Go along each sequence's rows for as long as the drawn token is the draft that the next row stands on, and
        does not end the output."""
        sampled = []
        place = 0
        for index, sequence in enumerate(step.sequences):
            result = SampledSequence([], error=errors.get(index))
            drafts = sequence.draft_token_ids
            ends = self._slots.state(step.slots[index]).end_ids if drafts else ()
            for row in range(sequence.num_rows if result.error is None else 0):
                if not -np.inf < largest[place + row] < np.inf:
                    result.error = _draw_error(len(sequence.token_ids) + row, largest[place + row])
                    break
                token_id = token_ids[place + row]
                result.token_ids.append(token_id)
                if row < len(drafts) and (token_id != drafts[row] or token_id in ends):
                    break
            place += sequence.num_rows
            sampled.append(result)
        return sampled

    def _report(self, logits: NDArray[np.float32], step: _Step, sampled: list[SampledSequence]) -> None:
        """Add log probabilities and logits of the accepted tokens."""
        rows: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        reported: list[SampledSequence] = []
        for sequence, slot, result in zip(step.sequences, step.slots, sampled, strict=True):
            spec = self._slots.state(slot).spec
            first, count = sequence.first_row, len(result.token_ids)
            if spec.return_generation_logits:
                result.generation_logits = logits[first : first + count].copy()
            if spec.return_log_probs or spec.num_top_log_probs:
                rows += range(first, first + count)
                token_ids += result.token_ids
                counts += [spec.num_top_log_probs] * count
                reported.append(result)
        if not reported:
            return
        log_probs = RawLogProbs(logits, np.array(rows, np.int64))
        of_tokens = log_probs.of(np.array(token_ids, np.int64))
        top = log_probs.top(np.array(counts, np.int64))
        begin = 0
        for result in reported:
            end = begin + len(result.token_ids)
            result.log_probs = of_tokens[begin:end]
            result.top_log_probs = top[begin:end]
            begin = end


def _most_likely(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The token with the largest logit of each row, the first of equals, and that logit."""
    if len(rows) == len(logits) and (rows == np.arange(len(rows))).all():
        token_ids = logits.argmax(axis=1)
    else:
        token_ids = np.array([logits[row].argmax() for row in rows], np.int64)
    return token_ids, logits[rows, token_ids]


def _draw_error(position: int, largest: float) -> SamplingError:
    if largest == -np.inf:
        return NoTokenLeftError(
            f"no token is left for position {position}: its grammar, bad words, minimum length, n-gram rule or "
            "post-processors exclude all of them"
        )
    return InvalidLogitsError(f"the logits for position {position} hold NaN or +inf")
