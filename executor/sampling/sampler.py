"""The sampler: logits of a whole step in, tokens of every sequence out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor.api.errors import UnsupportedFeatureError
from executor.sampling.counter_random import uniforms
from executor.sampling.draw import DrawParameters, draw
from executor.sampling.interface import SampledRows, SampledSequence, SamplingError, SamplingSpec
from executor.sampling.log_probs import RawLogProbs
from executor.sampling.slots import Needs, Slots


class Sampler:
    """Draws the next tokens of the sequences it was told of. Not thread-safe: one caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.vocab_size = vocab_size
        self._slots = Slots()

    def open(self, request_id: int, sampling: SamplingSpec) -> None:
        """Make a sequence known.

        Raises:
            InvalidRequestError: a field of `sampling` is wrong for this vocabulary.
            ValueError: `request_id` is open already.
        """
        sampling.validate(self.vocab_size)
        _refuse_what_is_not_offered(sampling)
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
        slots = np.array([self._slots.slot_of(sequence.request_id) for sequence in sequences])
        num_rows = np.array([sequence.num_rows for sequence in sequences])
        first_rows = np.array([sequence.first_row for sequence in sequences])
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        begins = np.cumsum(num_rows) - num_rows
        step = np.arange(int(num_rows.sum())) - np.repeat(begins, num_rows)
        rows = np.repeat(first_rows, num_rows) + step
        slot_of_row = np.repeat(slots, num_rows)
        token_ids, valid = self._draw(logits, rows, slot_of_row, np.repeat(lengths, num_rows) + step)

        sampled = _accepted(sequences, token_ids.tolist(), valid.tolist())
        needs = self._slots.needs[slots]
        if np.bitwise_or.reduce(needs) & (Needs.LOG_PROBS | Needs.GENERATION_LOGITS):
            self._report(logits, sequences, slots, sampled)
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
        return np.ascontiguousarray(logits)

    def _draw(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A token for each row, and whether the row could be drawn from."""
        drawn = (self._slots.needs[slots] & Needs.DRAW) != 0
        if not drawn.any():
            return _most_likely(logits, rows)
        token_ids = np.empty(len(rows), np.int64)
        valid = np.empty(len(rows), np.bool_)
        which = np.flatnonzero(~drawn)
        token_ids[which], valid[which] = _most_likely(logits, rows[which])
        which = np.flatnonzero(drawn)
        chosen = slots[which]
        parameters = DrawParameters(
            temperature=self._slots.temperature[chosen],
            top_k=self._slots.top_k[chosen],
            top_p=self._slots.top_p[chosen],
            min_p=self._slots.min_p[chosen],
            uniform=uniforms(self._slots.stream[chosen], positions[which]),
        )
        token_ids[which], valid[which] = draw(logits, rows[which], parameters)
        return token_ids, valid

    def _report(
        self,
        logits: NDArray[np.float32],
        sequences: Sequence[SampledRows],
        slots: NDArray[np.int64],
        sampled: list[SampledSequence],
    ) -> None:
        """Add log probabilities and logits of the accepted tokens."""
        rows: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        reported: list[SampledSequence] = []
        for sequence, slot, result in zip(sequences, slots.tolist(), sampled, strict=True):
            spec = self._slots.spec(slot)
            first, count = sequence.first_row, len(result.token_ids)
            if spec.return_generation_logits:
                result.generation_logits = logits[first : first + count].copy()
            if self._slots.needs[slot] & Needs.LOG_PROBS:
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


def _most_likely(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The token with the largest logit of each row, the first of equals; and whether that logit is a number."""
    if len(rows) == len(logits) and (rows == np.arange(len(rows))).all():
        token_ids = logits.argmax(axis=1)
    else:
        token_ids = np.array([logits[row].argmax() for row in rows], np.int64)
    return token_ids, np.isfinite(logits[rows, token_ids])


def _accepted(sequences: Sequence[SampledRows], token_ids: list[int], valid: list[bool]) -> list[SampledSequence]:
    """Go along each sequence's rows for as long as the drawn token is the draft that the next row stands on."""
    sampled = []
    row = 0
    for sequence in sequences:
        result = SampledSequence([])
        for step in range(sequence.num_rows):
            if not valid[row + step]:
                result.error = SamplingError(
                    f"the logits after {len(sequence.token_ids) + step} tokens hold no token that can be drawn "
                    "(NaN, +inf, or -inf for every token)"
                )
                break
            token_id = token_ids[row + step]
            result.token_ids.append(token_id)
            if step + 1 < sequence.num_rows and token_id != sequence.draft_token_ids[step]:
                break
        row += sequence.num_rows
        sampled.append(result)
    return sampled


def _refuse_what_is_not_offered(spec: SamplingSpec) -> None:
    config = spec.config
    wanted = {
        "top_p_decay": config.top_p_decay,
        "min_tokens": config.min_tokens,
        "repetition_penalty": config.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "bad_words": spec.bad_words or None,
        "embedding_bias": spec.embedding_bias,
        "logits_processors": spec.logits_processors or spec.batched_logits_processor or None,
        "grammar": spec.grammar,
    }
    for name, value in wanted.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} is not supported yet", field=name)
