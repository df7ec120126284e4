"""Where a sequence is in its grammar, by llguidance.

llguidance says which tokens keep the output inside the grammar. What ends an output is a request's own affair, and
must not end it where the grammar does not:

- the end id, and a stop token without text, may be drawn exactly where the grammar may end;
- a stop token or stop word that is text may be drawn only where the grammar allows it as text and may end after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from executor.api.errors import InvalidRequestError
from executor.sampling.errors import SamplingError
from executor.sampling.history import Words


class GrammarError(SamplingError):
    """The output left the grammar, or the grammar became too complex to follow."""


class GrammarVocabulary:
    """What grammars must know of the tokens they are over."""

    __slots__ = ("end_token_ids", "special_token_ids", "vocab_size")

    def __init__(self, vocab_size: int, end_token_ids: Sequence[int], special_token_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids)
        """By which llguidance says that the output may end; at least one."""
        self.special_token_ids = special_token_ids
        """Tokens without text."""


class CompiledGrammar:
    """A grammar that was checked and compiled; shared by all sequences that follow it."""

    def __init__(self, prototype: LLMatcher, masks: LLExecutor, vocabulary: GrammarVocabulary) -> None:
        self._prototype = prototype
        self._masks = masks
        self._vocabulary = vocabulary

    def matcher(
        self, *, end_id: int | None, stop_token_ids: Sequence[int] = (), stop_words: Sequence[Sequence[int]] = ()
    ) -> LlguidanceMatcher:
        """A matcher at the start of the grammar, for one sequence.

        Args:
            end_id: ends the output.
            stop_token_ids: end the output too.
            stop_words: token sequences that end the output.

        Raises:
            InvalidRequestError: nothing ends the output, so it could not end where the grammar does.
        """
        special = self._vocabulary.special_token_ids
        words = [*([token_id] for token_id in stop_token_ids if token_id not in special), *stop_words]
        ends = {token_id for token_id in stop_token_ids if token_id in special}
        if end_id is not None:
            ends.add(end_id)
        if not ends:
            raise InvalidRequestError(
                "guided decoding needs end_id: without one the output could not end where its grammar does",
                field="end_id",
            )
        return LlguidanceMatcher(self._prototype.deep_copy(), self._masks, self._vocabulary, sorted(ends), words)


class LlguidanceMatcher:
    """A `GrammarMatcher`. It remembers generated tokens only; drafts are tried and taken back."""

    def __init__(
        self,
        matcher: LLMatcher,
        masks: LLExecutor,
        vocabulary: GrammarVocabulary,
        ends: list[int],
        stop_words: Sequence[Sequence[int]],
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self._vocabulary = vocabulary
        self._ends = np.array(ends)
        self._stop_words = Words(stop_words)
        self._has_stop_words = len(stop_words) > 0
        self._tokens: list[int] = []
        self._own_ends = ends == sorted(vocabulary.end_token_ids)

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id in self._ends:
                continue
            if not self._matcher.consume_token(token_id):
                raise GrammarError(
                    f"token {token_id} is not what the grammar allows after {len(self._tokens)} generated tokens"
                )
            self._tokens.append(token_id)

    def fill_masks(self, masks: NDArray[np.uint32], draft_token_ids: Sequence[int]) -> None:
        drafts = list(draft_token_ids)
        if drafts:
            self._masks.unsafe_compute_mask_ptr_with_draft_token(
                [(self._matcher, 0, drafts)], masks.ctypes.data, masks.shape[1] * 4, len(masks)
            )
        else:
            self._matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.shape[1] * 4)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")
        if self._own_ends and not self._has_stop_words:
            return
        for step, mask in enumerate(masks):
            self._set_ends(mask, drafts[:step])

    def _set_ends(self, mask: NDArray[np.uint32], drafts: list[int]) -> None:
        """Let the request's own end tokens, instead of the vocabulary's, end the output."""
        known = self._vocabulary.end_token_ids
        may_end = _get(mask, known[0])
        for token_id in known:
            _set(mask, token_id, False)
        for token_id in self._ends.tolist():
            _set(mask, token_id, may_end)
        for token_id in self._stop_words.completions([*self._tokens, *drafts]):
            if _get(mask, token_id):
                _set(mask, token_id, self._may_end_after([*drafts, token_id]))

    def _may_end_after(self, token_ids: list[int]) -> bool:
        consumed = self._matcher.try_consume_tokens(token_ids)
        accepting = consumed == len(token_ids) and self._matcher.is_accepting()
        self._matcher.rollback(consumed)
        return bool(accepting)


def _get(mask: NDArray[np.uint32], token_id: int) -> bool:
    return bool((int(mask[token_id // 32]) >> (token_id % 32)) & 1)


def _set(mask: NDArray[np.uint32], token_id: int, allowed: bool) -> None:
    bit = np.uint32(1 << (token_id % 32))
    if allowed:
        mask[token_id // 32] |= bit
    else:
        mask[token_id // 32] &= ~bit


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]
