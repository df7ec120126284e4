"""One output's text: detokenizer and stop strings in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from executor.text.incremental_decoder import IncrementalDecoder
from executor.text.stop_strings import StopStrings
from executor.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a stream has to say now."""

    text: str
    stopped: str | None
    """The stop string that ended the text."""


class TextStream:
    """Turns an output's tokens into the text that a client may see.

    Text is held back only while it may be part of a character or of a stop string. The first stop string to be
    completed ends the stream, wherever token boundaries fall; of two that end at the same character, the one named
    first.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_state", "_stop_strings", "_stopped")

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], include_stop: bool, skip_special_tokens: bool = True
    ) -> None:
        """Begin an output.

        Args:
            tokenizer: whose tokens they are.
            stop: stop strings, none of them empty.
            include_stop: whether the text ends with the stop string or before it.
            skip_special_tokens: whether special tokens have no text.
        """
        self._decoder: IncrementalDecoder = tokenizer.incremental_decoder(skip_special_tokens=skip_special_tokens)
        self._stop_strings = StopStrings(stop)
        self._include_stop = include_stop
        self._held = ""
        self._state = 0
        self._stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that these tokens add. After a stop string there is none."""
        if self._stopped is not None:
            return TextDelta("", self._stopped)
        return self._take(self._decoder.push(token_ids))

    def finish(self) -> TextDelta:
        """What is still held back, at the end of the output."""
        if self._stopped is not None:
            return TextDelta("", self._stopped)
        delta = self._take(self._decoder.finish())
        if delta.stopped is not None:
            return delta
        held, self._held, self._state = self._held, "", 0
        return TextDelta(delta.text + held, None)

    def _take(self, text: str) -> TextDelta:
        self._state, match = self._stop_strings.scan(text, self._state)
        if match is not None:
            self._stopped = match.stop
            seen = self._held + text[: match.end]
            self._held = ""
            return TextDelta(seen if self._include_stop else seen[: len(seen) - len(match.stop)], match.stop)
        seen = self._held + text
        cut = len(seen) - self._stop_strings.num_held(self._state)
        self._held = seen[cut:]
        return TextDelta(seen[:cut], None)
