"""Where the last few tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Every n-gram of a growing sequence, by its latest occurrence. Costs O(max_ngram_size) a token, never a search.

    ```
    tokens      7 8 9 4 7 8 9      last three tokens: 7 8 9, seen before at 0..2, followed by 4
                      ^ continues at 3, match length 3
    ```
    """

    __slots__ = ("_continuations", "_latest", "max_ngram_size", "token_ids")

    def __init__(self, max_ngram_size: int) -> None:
        if max_ngram_size < 1:
            raise ValueError(f"max_ngram_size is {max_ngram_size}; it must be at least 1")
        self.max_ngram_size = max_ngram_size
        self.token_ids: list[int] = []
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram_size)]
        """By n - 1: n-gram to the index of the token after its latest occurrence."""
        self._continuations: list[int | None] = [None] * max_ngram_size
        """By n - 1: the same for the occurrence before the latest one of the n-gram that ends the sequence."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        tokens = self.token_ids
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            for size in range(1, min(self.max_ngram_size, end) + 1):
                latest = self._latest[size - 1]
                ngram = tuple(tokens[end - size :])
                self._continuations[size - 1] = latest.get(ngram)
                latest[ngram] = end

    def match(self) -> tuple[int, int] | None:
        """The longest end of the sequence that occurred before: its length, and the index of the token that followed
        it then."""
        for size in range(self.max_ngram_size, 0, -1):
            continuation = self._continuations[size - 1]
            if continuation is not None:
                return size, continuation
        return None

    def continuation(self, begin: int, count: int) -> list[int]:
        """`count` tokens from `begin` on; past the end it goes on as if the sequence repeated itself."""
        tokens = self.token_ids
        copied = tokens[begin : begin + count]
        period = len(copied)
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied
