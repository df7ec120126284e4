"""The sampler: logits of a whole step in, tokens of every sequence out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.counter_random import uniforms
from executor.sampling.draw import DrawParameters, draw
from executor.sampling.edits import EditNotes, LogitsEdits
from executor.sampling.errors import InvalidLogitsError, NoTokenLeftError, SamplingError
from executor.sampling.interface import (
    SampledRows,
    SampledSequence,
    SamplingSpec,
)
from executor.sampling.known_maxima import KnownMaxima
from executor.sampling.log_probs import RawLogProbs
from executor.sampling.ranking import RankedTokens, rank_most_likely
from executor.sampling.raw_reductions import RawReducer
from executor.sampling.row_edits import Edited, RowEdits, RowMask
from executor.sampling.row_passes import Maxima, RowPasses
from executor.sampling.slots import Needs, Slots


class PreparedStep(NamedTuple):
    """What is known of a step without its logits: its rows, in the order of its sequences, and what changes in them."""

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
    top_p: NDArray[np.float64]
    """[R]"""
    edits: LogitsEdits
    """Of single logits."""
    by_row: list[Edited]
    """Sequences with post-processors, a dense bias or a grammar."""
    masks: list[RowMask]
    """Of their grammars."""
    errors: dict[int, SamplingError]
    """By sequence."""


class _Raw(NamedTuple):
    """Of raw rows `first` to `first + R`, those with log probabilities among them."""

    first: int
    maxima: Maxima
    log_probs: RawLogProbs


class Sampler:
    """Draws the next tokens of the sequences it was told of. Not thread-safe: one caller at a time."""

    def __init__(self, vocab_size: int, *, num_threads: int | None = None) -> None:
        """Begin.

        Args:
            vocab_size: logits of a row.
            num_threads: threads that share passes over whole rows; `None`: one for each processor, up to eight.
        """
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.vocab_size = vocab_size
        self._slots = Slots()
        self._row_edits = RowEdits(vocab_size)
        self._passes = RowPasses(vocab_size, num_threads)
        self._raw_reducer = RawReducer(self._passes, num_threads)

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
        """`prepare` and `draw`, for those who have the logits already."""
        return self.draw(logits, self.prepare(sequences))

    def prepare(self, sequences: Sequence[SampledRows]) -> PreparedStep:
        """Take in the new tokens of each sequence and gather what changes in its rows, while the logits are computed.

        Args:
            sequences: whose rows they are; each row belongs to at most one of them.

        Raises:
            ValueError: row numbers and drafts that do not fit together.
            KeyError: a sequence that is not open.
        """
        slots = self._slots.find([sequence.request_id for sequence in sequences])
        lengths_of = [
            (sequence.first_row, len(sequence.token_ids), sequence.num_rows, len(sequence.draft_token_ids))
            for sequence in sequences
        ]
        first, lengths, num_rows, num_drafts = np.array(lengths_of, np.int64).reshape(-1, 4).T
        wrong = np.flatnonzero((num_rows != 1 + num_drafts) | (first < 0))
        if wrong.size:
            raise _rows_refused(sequences[wrong[0]], None)
        parameters = self._slots.table[slots]
        needs = int(np.bitwise_or.reduce(parameters["needs"]))
        if len(sequences) < num_rows.sum():
            ends = np.cumsum(num_rows)
            steps = np.arange(ends[-1]) - np.repeat(ends - num_rows, num_rows)
            parameters = np.repeat(parameters, num_rows)
            first = np.repeat(first, num_rows) + steps
            lengths = np.repeat(lengths, num_rows) + steps
        notes = EditNotes(self.vocab_size)
        top_p = parameters["top_p"].copy()
        errors: dict[int, SamplingError] = {}
        by_row: list[Edited] = []
        masks: list[RowMask] = []
        if needs & Needs.STATE:
            self._follow(sequences, slots, notes, top_p, by_row, errors)
            masks, failed = self._row_edits.masks(by_row)
            errors |= failed
        return PreparedStep(
            sequences, slots, needs, first, parameters, lengths, top_p, notes.arrange(), by_row, masks, errors
        )

    def draw(self, logits: NDArray[np.float32], step: PreparedStep) -> list[SampledSequence]:
        """Draw the tokens of a step.

        Args:
            logits: float32 `[S, vocab_size]`. Scratch: what it holds afterwards is undefined.
            step: what `prepare` gave for its sequences; used up.

        Returns:
            One entry for each sequence, in order. A sequence that cannot be drawn has an `error`; it never affects the
            others.

        Raises:
            ValueError: logits of another shape or type, or without some of the rows.
        """
        if not step.sequences:
            return []
        self._check(logits, step)
        logits = np.require(logits, requirements=["C", "W"])
        raw = self._reduce(logits, step) if step.needs & Needs.LOG_PROBS else None
        raw_rows: dict[int, NDArray[np.float32]] = {}
        if step.needs & Needs.RAW_LOGITS and step.needs & Needs.ROW_EDITS:
            raw_rows = self._keep_raw_rows(logits, step)
        self._edit(logits, step)

        known = None if raw is None or not step.needs & Needs.DRAW else _known(logits, step, raw)
        token_ids, levels = self._draw(logits, step, known)
        sampled = self._accepted(step, token_ids, levels)
        if step.needs & Needs.RAW_LOGITS:
            step.edits.undo(logits)
            for row, values in raw_rows.items():
                logits[row] = values
            self._report(logits, step, sampled, None if raw is None else raw.log_probs)
        return sampled

    def _check(self, logits: NDArray[np.float32], step: PreparedStep) -> None:
        """That rows and logits fit together."""
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or logits.dtype != np.float32:
            raise ValueError(
                f"logits are {logits.dtype} {list(logits.shape)}; they must be float32 [rows, {self.vocab_size}]"
            )
        if step.rows.max() >= len(logits):
            raise next(
                _rows_refused(sequence, len(logits))
                for sequence in step.sequences
                if sequence.first_row + sequence.num_rows > len(logits)
            )

    def _keep_raw_rows(self, logits: NDArray[np.float32], step: PreparedStep) -> dict[int, NDArray[np.float32]]:
        """Copies of the rows that are edited as a whole and wanted raw afterwards."""
        needs = step.parameters["needs"]
        wanted = ((needs & Needs.RAW_LOGITS) != 0) & ((needs & Needs.ROW_EDITS) != 0)
        return {row: logits[row].copy() for row in step.rows[wanted].tolist()}

    def _follow(
        self,
        sequences: Sequence[SampledRows],
        slots: list[int],
        notes: EditNotes,
        top_p: NDArray[np.float64],
        by_row: list[Edited],
        errors: dict[int, SamplingError],
    ) -> None:
        """Take in the new tokens of each sequence; what changes in its rows goes to `notes`, `top_p` and `by_row`."""
        needs: list[int] = self._slots.table["needs"][slots].tolist()
        place = 0
        for index, sequence in enumerate(sequences):
            if needs[index] & Needs.STATE:
                state = self._slots.state(slots[index])
                try:
                    state.follow(sequence.token_ids)
                except SamplingError as error:
                    errors[index] = error
                if needs[index] & Needs.ROW_EDITS and index not in errors:
                    by_row.append(Edited(index, sequence, state))
                if needs[index] & Needs.EDITS:
                    state.collect(sequence, notes, top_p[place : place + sequence.num_rows])
            place += sequence.num_rows

    def _reduce(self, logits: NDArray[np.float32], step: PreparedStep) -> _Raw:
        """What is reported of the raw logits."""
        reported = (step.parameters["needs"] & Needs.LOG_PROBS) != 0
        rows = step.rows[reported]
        first = int(rows.min())
        maxima, normalizers = self._raw_reducer.reduce(logits[first : int(rows.max()) + 1])
        counts = step.parameters["num_top_log_probs"][reported]
        rows, counts = rows[counts > 0], counts[counts > 0]
        ranked = RankedTokens(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))
        if rows.size:
            some = maxima if len(rows) == len(maxima.fine) else maxima.take(rows - first)
            ranked = rank_most_likely(logits, rows, some, counts)
        return _Raw(first, maxima, RawLogProbs(first, normalizers, rows, ranked))

    def _edit(self, logits: NDArray[np.float32], step: PreparedStep) -> None:
        """Make all edits; errors of post-processors go to `step.errors`."""
        if step.by_row:
            by_row = [edited for edited in step.by_row if edited.place not in step.errors]
            step.errors.update(self._row_edits.process(logits, by_row))
        step.edits.apply(logits)
        self._row_edits.exclude(logits, step.masks)

    def _draw(
        self,
        logits: NDArray[np.float32],
        step: PreparedStep,
        known: KnownMaxima | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token for each row, and a logit of it: finite, or why the row cannot be drawn from (see `draw`)."""
        if not step.needs & Needs.DRAW:
            return self._passes.most_likely(logits, step.rows)
        token_ids = np.empty(len(step.rows), np.int64)
        levels = np.empty(len(step.rows), np.float32)
        drawn = (step.parameters["needs"] & Needs.DRAW) != 0
        which = np.flatnonzero(~drawn)
        token_ids[which], levels[which] = self._passes.most_likely(logits, step.rows[which])
        which = np.flatnonzero(drawn)
        chosen = step.parameters[which]
        parameters = DrawParameters(
            temperature=chosen["temperature"],
            top_k=chosen["top_k"],
            top_p=step.top_p[which],
            min_p=chosen["min_p"],
            uniform=uniforms(chosen["stream"], step.positions[which]),
        )
        token_ids[which], levels[which] = draw(logits, step.rows[which], parameters, self._passes, known)
        return token_ids, levels

    def _accepted(
        self,
        step: PreparedStep,
        token_ids: NDArray[np.int64],
        levels: NDArray[np.float32],
    ) -> list[SampledSequence]:
        """Go along each sequence's rows for as long as the drawn token is the draft that the next row stands on, and
        does not end the output."""
        if len(step.rows) == len(step.sequences) and not step.errors and np.isfinite(levels).all():
            return [SampledSequence([token_id]) for token_id in token_ids.tolist()]
        drawn = list(zip(token_ids.tolist(), levels.tolist(), strict=True))
        sampled = []
        place = 0
        for index, sequence in enumerate(step.sequences):
            result = SampledSequence([], error=step.errors.get(index))
            if result.error is None:
                ends = self._slots.state(step.slots[index]).end_ids
                _accept(result, sequence, drawn[place : place + sequence.num_rows], ends)
            place += sequence.num_rows
            sampled.append(result)
        return sampled

    def _report(
        self,
        logits: NDArray[np.float32],
        step: PreparedStep,
        sampled: list[SampledSequence],
        log_probs: RawLogProbs | None,
    ) -> None:
        """Add log probabilities and logits of the accepted tokens."""
        rows: list[int] = []
        token_ids: list[int] = []
        reported: list[SampledSequence] = []
        for sequence, slot, result in zip(step.sequences, step.slots, sampled, strict=True):
            spec = self._slots.state(slot).spec
            first, count = sequence.first_row, len(result.token_ids)
            if spec.return_generation_logits:
                result.generation_logits = logits[first : first + count].copy()
            if spec.return_log_probs or spec.num_top_log_probs:
                rows += range(first, first + count)
                token_ids += result.token_ids
                reported.append(result)
        if log_probs is None or not reported:
            return
        row_numbers = np.array(rows, np.int64)
        of_tokens = log_probs.of(logits, row_numbers, np.array(token_ids, np.int64))
        top = log_probs.top(row_numbers)
        begin = 0
        for result in reported:
            end = begin + len(result.token_ids)
            result.log_probs = of_tokens[begin:end]
            result.top_log_probs = top[begin:end]
            begin = end


def _known(logits: NDArray[np.float32], step: PreparedStep, raw: _Raw) -> KnownMaxima:
    """Maxima of the edited rows from those of the raw ones, which are used up; rows edited as a whole are unknown."""
    is_known = np.isfinite(raw.log_probs.normalizers)
    if step.needs & Needs.ROW_EDITS:
        changed = step.rows[(step.parameters["needs"] & Needs.ROW_EDITS) != 0] - raw.first
        is_known[changed[(changed >= 0) & (changed < len(is_known))]] = False
    step.edits.refresh(logits, raw.maxima.fine, raw.first)
    return KnownMaxima(raw.first, Maxima.of(raw.maxima.fine), is_known)


def _rows_refused(sequence: SampledRows, num_logits: int | None) -> ValueError:
    end = sequence.first_row + sequence.num_rows
    of_all = "" if num_logits is None else f" of {num_logits}"
    return ValueError(
        f"request {sequence.request_id} has rows {sequence.first_row} to {end}{of_all} for "
        f"{len(sequence.draft_token_ids)} drafts; it needs one row more than drafts"
    )


def _accept(
    result: SampledSequence, sequence: SampledRows, drawn: list[tuple[int, float]], ends: Collection[int]
) -> None:
    drafts = sequence.draft_token_ids
    for row, (token_id, level) in enumerate(drawn):
        if not -np.inf < level < np.inf:
            result.error = _draw_error(len(sequence.token_ids) + row, level)
            break
        result.token_ids.append(token_id)
        if row < len(drafts) and (token_id != drafts[row] or token_id in ends):
            break


def _draw_error(position: int, level: float) -> SamplingError:
    if level == -np.inf:
        return NoTokenLeftError(
            f"no token is left for position {position}: its grammar, bad words, minimum length, n-gram rule or "
            "post-processors exclude all of them"
        )
    return InvalidLogitsError(f"the logits for position {position} hold NaN or +inf")
