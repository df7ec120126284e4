"""Where the last few tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Every n-gram of a growing sequence, by its latest occurrence. Costs O(max_ngram_size) a token, never a search.

    ```
    tokens      7 8 9 4 7 8 9      last three tokens: 7 8 9, seen before at 0..2, followed by 4
                      ^ continues at 3, match length 3
    ```

    A match is followed for as long as the sequence goes on as it did, so it can become longer than any n-gram: text
    that is copied is not left for a later occurrence of its last few tokens.
    """

    __slots__ = ("_continuation", "_latest", "_length", "max_ngram_size", "token_ids")

    def __init__(self, max_ngram_size: int) -> None:
        if max_ngram_size < 1:
            raise ValueError(f"max_ngram_size is {max_ngram_size}; it must be at least 1")
        self.max_ngram_size = max_ngram_size
        self.token_ids: list[int] = []
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram_size)]
        """By n - 1: n-gram to the index of the token after its latest occurrence."""
        self._length = 0
        self._continuation = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        tokens = self.token_ids
        for token_id in token_ids:
            if self._length and tokens[self._continuation] == token_id:
                self._length += 1
                self._continuation += 1
            else:
                self._length = 0
            tokens.append(token_id)
            end = len(tokens)
            for size in range(1, min(self.max_ngram_size, end) + 1):
                latest = self._latest[size - 1]
                ngram = tuple(tokens[end - size :])
                continuation = latest.get(ngram)
                if continuation is not None and size > self._length:
                    self._length = size
                    self._continuation = continuation
                latest[ngram] = end

    def match(self) -> tuple[int, int] | None:
        """The end of the sequence that is matched to an earlier part: its length, and the index of the token that
        followed it then."""
        return (self._length, self._continuation) if self._length else None

    def continuation(self, begin: int, count: int) -> list[int]:
        """`count` tokens from `begin` on; past the end it goes on as if the sequence repeated itself."""
        tokens = self.token_ids
        copied = tokens[begin : begin + count]
        period = len(copied)
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied
