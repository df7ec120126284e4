"""One open sequence: its options made ready to be applied, and the history that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from executor.sampling.edits import EditNotes
from executor.sampling.history import DecayingTopP, RepeatedNgrams, TokenCounts, Words
from executor.sampling.interface import SampledRows, SamplingSpec
from executor.sampling.processors import BatchedProcessor, Processor

_DENSE_BIAS = 1 / 16
"""An embedding bias that touches at least this part of the vocabulary is added to whole rows."""

_TOP_P_FLOOR = 1e-6
"""`top_p_min` where it is not given."""


class SequenceState:
    """Follows one sequence: generated tokens for good (`follow`), drafts for a while (`push`, `pop`)."""

    __slots__ = (
        "_bad_words",
        "_bias",
        "_counts",
        "_min_length",
        "_ngrams",
        "_num_prompt_tokens",
        "_penalties",
        "_stop_words",
        "_tokens",
        "_top_p",
        "batched_processor",
        "dense_bias",
        "end_ids",
        "grammar",
        "processors",
        "spec",
    )

    def __init__(self, spec: SamplingSpec) -> None:
        config = spec.config
        self.spec = spec
        self._tokens = list(spec.prompt_token_ids)
        self._num_prompt_tokens = len(self._tokens)
        self._min_length = self._num_prompt_tokens + (config.min_tokens or 0)
        self.end_ids = sorted({*spec.stop_token_ids, *(() if spec.end_id is None else (spec.end_id,))})
        self._bad_words = Words(spec.bad_words) if spec.bad_words else None
        self._stop_words = Words(spec.stop_words) if spec.stop_words else None

        # The temperature comes before the penalties. Here logits are not divided by it: what the penalties subtract
        # is multiplied by it instead, which gives the same distribution.
        scale = config.temperature or 1.0
        self._penalties = (
            _or(config.repetition_penalty, 1.0),
            _or(config.presence_penalty, 0.0) * scale,
            _or(config.frequency_penalty, 0.0) * scale,
        )
        self._counts: TokenCounts | None = None
        if self._penalties != (1.0, 0.0, 0.0):
            self._counts = TokenCounts(self._tokens, config.prompt_ignore_length or 0)
        self._ngrams: RepeatedNgrams | None = None
        if config.no_repeat_ngram_size is not None:
            self._ngrams = RepeatedNgrams(config.no_repeat_ngram_size)
            for end in range(1, len(self._tokens) + 1):
                self._ngrams.push(self._tokens, end)
        self._top_p: DecayingTopP | None = None
        if config.top_p and _or(config.top_p_decay, 1.0) != 1.0:
            floor = _or(config.top_p_min, _TOP_P_FLOOR)
            self._top_p = DecayingTopP(config.top_p, _or(config.top_p_decay, 1.0), floor, config.top_p_reset_ids)

        self._bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        self.dense_bias: NDArray[np.float32] | None = None
        """float32 `[vocab_size]`, to be added to whole rows."""
        if spec.embedding_bias is not None:
            bias = np.ascontiguousarray(spec.embedding_bias, np.float32)
            token_ids = np.flatnonzero(bias)
            if len(token_ids) >= _DENSE_BIAS * len(bias):
                self.dense_bias = bias
            elif len(token_ids):
                self._bias = token_ids, bias[token_ids]

        self.processors = [Processor(call) for call in spec.logits_processors]
        self.batched_processor: BatchedProcessor | None = None
        if spec.batched_logits_processor is not None:
            self.batched_processor = BatchedProcessor(spec.batched_logits_processor)
        self.grammar = spec.grammar

    @property
    def has_edits(self) -> bool:
        """Whether some tokens' logits, or `top_p`, depend on this state."""
        config = self.spec.config
        return bool(
            self._bias is not None
            or self._counts is not None
            or self._ngrams is not None
            or self._top_p is not None
            or self._bad_words is not None
            or (config.min_tokens and (self.end_ids or self.spec.stop_words))
        )

    @property
    def has_row_edits(self) -> bool:
        """Whether whole rows of logits change."""
        return bool(
            self.dense_bias is not None
            or self.processors
            or self.batched_processor is not None
            or self.grammar is not None
        )

    @property
    def token_ids(self) -> list[int]:
        """Prompt, generated tokens, and drafts while they are pushed; a copy."""
        return list(self._tokens)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in what is new in `token_ids`, which holds prompt and generated tokens.

        Raises:
            SamplingError: the grammar does not allow a token.
        """
        new = token_ids[len(self._tokens) :]
        for token_id in new:
            self.push(token_id)
        if self.grammar is not None and new:
            self.grammar.advance(new)

    def push(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if self._counts is not None:
            self._counts.push(token_id)
        if self._ngrams is not None:
            self._ngrams.push(self._tokens, len(self._tokens))
        if self._top_p is not None:
            self._top_p.push(token_id)

    def pop(self) -> None:
        """Take back the last push."""
        if self._top_p is not None:
            self._top_p.pop()
        if self._ngrams is not None:
            self._ngrams.pop(self._tokens)
        token_id = self._tokens.pop()
        if self._counts is not None:
            self._counts.pop(token_id)

    def collect(self, sequence: SampledRows, edits: EditNotes, top_p: NDArray[np.float64]) -> None:
        """Note what changes in the sequence's rows, and write a decaying `top_p` for each of them.

        Drafts are pushed for the rows that stand on them, and popped.
        """
        self._collect(sequence.first_row, edits)
        if self._top_p is not None:
            top_p[0] = self._top_p.value
        for step, token_id in enumerate(sequence.draft_token_ids, 1):
            self.push(token_id)
            self._collect(sequence.first_row + step, edits)
            if self._top_p is not None:
                top_p[step] = self._top_p.value
        for _ in sequence.draft_token_ids:
            self.pop()

    def _collect(self, row: int, edits: EditNotes) -> None:
        """Note what changes in the row that follows the tokens so far."""
        if self._bias is not None:
            edits.add(row, *self._bias)
        if self._counts is not None:
            edits.penalize(row, self._counts.token_ids(), self._counts.counts(), self._penalties)
        banned: list[int] = []
        if self._bad_words is not None:
            banned += self._bad_words.completions(self._tokens)
        if self._ngrams is not None:
            banned += self._ngrams.completions(self._tokens)
        if len(self._tokens) < self._min_length:
            banned += self.end_ids
            if self._stop_words is not None:
                banned += self._stop_words.completions(self._tokens, begin=self._num_prompt_tokens)
        if banned:
            edits.ban(row, banned)


_T = TypeVar("_T")


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
