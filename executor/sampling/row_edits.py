"""Changes to whole rows: logits post-processors, a dense embedding bias, grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.errors import SamplingError
from executor.sampling.interface import SampledRows
from executor.sampling.masks import MaskApplier, mask_words
from executor.sampling.processors import BatchedProcessor
from executor.sampling.sequence_state import SequenceState


class Edited(NamedTuple):
    """A sequence of the step whose rows are edited as a whole."""

    place: int
    """Among the step's sequences."""
    rows: SampledRows
    state: SequenceState


class RowMask(NamedTuple):
    row: int
    allowed: NDArray[np.uint32]
    """[words] a bit for each token"""


class RowEdits:
    """Edits whole rows in place. An error ends only the sequence it is about."""

    def __init__(self, vocab_size: int) -> None:
        self._mask_applier = MaskApplier(vocab_size)
        self._mask_words = mask_words(vocab_size)

    def process(self, logits: NDArray[np.float32], sequences: Iterable[Edited]) -> dict[int, SamplingError]:
        """Post-processors and dense bias: they see and change raw logits. Returns errors by `place`."""
        errors: dict[int, SamplingError] = {}
        batched: dict[int, tuple[BatchedProcessor, list[Edited]]] = {}
        for sequence in sequences:
            state = sequence.state
            try:
                _process_rows(logits, sequence)
            except SamplingError as error:
                errors[sequence.place] = error
                continue
            if state.batched_processor is not None:
                key = id(state.batched_processor.call)
                batched.setdefault(key, (state.batched_processor, []))[1].append(sequence)
        for processor, members in batched.values():
            try:
                _process_batch(logits, processor, members)
            except SamplingError as error:
                errors |= {member.place: error for member in members}
        for sequence in sequences:
            if sequence.state.dense_bias is not None:
                for row in _row_numbers(sequence):
                    logits[row] += sequence.state.dense_bias
        return errors

    def masks(self, sequences: Iterable[Edited]) -> tuple[list[RowMask], dict[int, SamplingError]]:
        """What the grammars allow in each of their rows, and errors by `place`. Needs no logits."""
        masks: list[RowMask] = []
        errors: dict[int, SamplingError] = {}
        for sequence in sequences:
            grammar = sequence.state.grammar
            if grammar is None:
                continue
            allowed = np.zeros((sequence.rows.num_rows, self._mask_words), np.uint32)
            try:
                grammar.fill_masks(allowed, sequence.rows.draft_token_ids)
            except SamplingError as error:
                errors[sequence.place] = error
                continue
            masks += map(RowMask, _row_numbers(sequence), allowed)
        return masks, errors

    def exclude(self, logits: NDArray[np.float32], masks: Iterable[RowMask]) -> None:
        """What the grammars do not allow."""
        for row, allowed in masks:
            self._mask_applier.apply(logits[row], allowed)


def _row_numbers(sequence: Edited) -> range:
    return range(sequence.rows.first_row, sequence.rows.first_row + sequence.rows.num_rows)


def _tokens_before(sequence: Edited, step: int) -> list[int]:
    """A copy for foreign code: the tokens before the row after `step` drafts."""
    return [*sequence.rows.token_ids, *sequence.rows.draft_token_ids[:step]]


def _process_rows(logits: NDArray[np.float32], sequence: Edited) -> None:
    spec = sequence.state.spec
    for processor in sequence.state.processors:
        for step, row in enumerate(_row_numbers(sequence)):
            processor(sequence.rows.request_id, logits[row], _tokens_before(sequence, step), spec.client_id)


def _process_batch(logits: NDArray[np.float32], processor: BatchedProcessor, members: list[Edited]) -> None:
    rows = [(member, step, row) for member in members for step, row in enumerate(_row_numbers(member))]
    processor(
        [member.rows.request_id for member, _, _ in rows],
        [logits[row] for _, _, row in rows],
        [_tokens_before(member, step) for member, step, _ in rows],
        [member.state.spec.client_id for member, _, _ in rows],
    )
