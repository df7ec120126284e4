"""What a sequence's next token depends on beside its logits, kept up to date token by token.

Each class follows one option. `push` adds a token and `pop` takes the last one back, so that the rows after drafts
see the drafts before them and nothing remembers drafts that were rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """How often each token occurred: for the repetition, presence and frequency penalties.

    Repetition looks at the prompt and the output; presence and frequency leave out the first
    `prompt_ignore_length` prompt tokens. So a token can be there and yet be counted 0 times.
    """

    __slots__ = ("_counts", "_occurrences", "_place_of", "_token_ids")

    def __init__(self, prompt_token_ids: Sequence[int], prompt_ignore_length: int) -> None:
        prompt = np.asarray(prompt_token_ids, np.int64)
        self._token_ids, inverse, occurrences = np.unique(prompt, return_inverse=True, return_counts=True)
        self._counts = np.bincount(inverse[prompt_ignore_length:], minlength=len(self._token_ids))
        self._occurrences: list[int] = occurrences.tolist()
        """Of each distinct token, all of them; its length is how much of the two arrays is in use."""
        self._place_of = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}

    def push(self, token_id: int) -> None:
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self._occurrences)
            self._occurrences.append(0)
            if place == len(self._counts):
                more = np.zeros(place + 64, np.int64)
                self._token_ids = np.concatenate([self._token_ids, more])
                self._counts = np.concatenate([self._counts, more])
            self._token_ids[place] = token_id
            self._counts[place] = 0
        self._occurrences[place] += 1
        self._counts[place] += 1

    def pop(self, token_id: int) -> None:
        """Take back the last push, which was of this token."""
        place = self._place_of[token_id]
        self._occurrences[place] -= 1
        self._counts[place] -= 1
        if self._occurrences[place] == 0:
            self._occurrences.pop()
            del self._place_of[token_id]

    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens, `[n]`; a view, right until a token is pushed after a pop."""
        return self._token_ids[: len(self._occurrences)]

    def counts(self) -> NDArray[np.int64]:
        """How often each of them counts for presence and frequency, `[n]`; a copy."""
        return self._counts[: len(self._occurrences)].copy()


class RepeatedNgrams:
    """Tokens that would complete an n-gram that the sequence, prompt included, holds already."""

    __slots__ = ("_followers", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def push(self, tokens: list[int], end: int) -> None:
        """`tokens[end - 1]` is the new token."""
        if end >= self._size:
            self._followers.setdefault(tuple(tokens[end - self._size : end - 1]), []).append(tokens[end - 1])

    def pop(self, tokens: list[int]) -> None:
        """Take back the last token of `tokens`, which is still there."""
        if len(tokens) >= self._size:
            self._followers[tuple(tokens[len(tokens) - self._size : -1])].pop()

    def completions(self, tokens: list[int]) -> list[int]:
        begin = len(tokens) - self._size + 1
        return self._followers.get(tuple(tokens[begin:]), []) if begin >= 0 else []


class Words:
    """Token sequences, and which tokens would complete one of them."""

    __slots__ = ("_by_last", "_single")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._single = sorted({word[0] for word in words if len(word) == 1})
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        """Words of several tokens by the last token before their end: (all before the end, the end)."""
        for word in words:
            if len(word) > 1:
                *before, end = word
                self._by_last.setdefault(before[-1], []).append((before, end))

    def completions(self, tokens: list[int], begin: int = 0) -> list[int]:
        """Tokens that complete a word whose other tokens end `tokens`, none of them before index `begin`."""
        if len(tokens) == begin or tokens[-1] not in self._by_last:
            return self._single
        length = len(tokens)
        ends = [
            end
            for before, end in self._by_last[tokens[-1]]
            if len(before) <= length - begin and tokens[length - len(before) :] == before
        ]
        return self._single + ends


class DecayingTopP:
    """`top_p` that shrinks with every generated token, down to a floor, and starts again after one token."""

    __slots__ = ("_decay", "_floor", "_reset_id", "_values")

    def __init__(self, top_p: float, decay: float, floor: float, reset_id: int | None) -> None:
        self._values = [top_p]
        self._decay = decay
        self._floor = floor
        self._reset_id = reset_id

    @property
    def value(self) -> float:
        return self._values[-1]

    def push(self, token_id: int) -> None:
        if token_id == self._reset_id:
            self._values.append(self._values[0])
        else:
            self._values.append(max(self._values[-1] * self._decay, min(self._floor, self._values[0])))

    def pop(self) -> None:
        self._values.pop()
