"""Token ids to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from executor.text.token_bytes import TokenBytes

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Turns tokens into text as they come. The pieces joined equal the text of all tokens at once.

    Bytes that may still become a character are held back; bytes that cannot become one give U+FFFD at once, one for
    each maximal invalid part, as the Unicode standard recommends (section 3.9). No sequence of ids is an error.
    """

    __slots__ = ("_at_start", "_by_id", "_drops_leading_space", "_skipped", "_utf8")

    def __init__(self, table: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._by_id = table.by_id
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._drops_leading_space = table.drops_leading_space
        self._at_start = True
        self._utf8 = _Utf8Decoder(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. Ids beyond the tokenizer's have none (a vocabulary may be padded)."""
        known = len(self._by_id)
        data = b"".join(
            [self._by_id[token_id] for token_id in token_ids if token_id < known and token_id not in self._skipped]
        )
        return self._without_leading_space(self._utf8.decode(data))

    def finish(self) -> str:
        """The text of what was held back: U+FFFD where a character stayed incomplete."""
        return self._without_leading_space(self._utf8.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            if self._drops_leading_space and text[0] == " ":
                return text[1:]
        return text
