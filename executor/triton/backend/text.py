"""The tokenizer of an engine directory, in Triton's interpreter: the `tokenizers` library and our detokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from executor.text.incremental_decoder import IncrementalDecoder
from executor.text.token_bytes import token_bytes
from executor.triton.backend.settings import ParameterError


class TextCodec:
    """Text to token ids and back. Thread-safe."""

    def __init__(self, tokenizer_dir: str) -> None:
        """Load `tokenizer.json` and `tokenizer_config.json`.

        Raises:
            ParameterError: they are not there, or cannot be read.
        """
        path = Path(tokenizer_dir) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            self._table = token_bytes(self._tokenizer, json.loads(text)["decoder"])
        except Exception as error:  # the library raises nothing narrower
            raise ParameterError(f"parameter tokenizer_dir: {path} cannot be used: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = _special_tokens(path.with_name("tokenizer_config.json"))
        self.end_id = self._id(special.get("eos_token"))
        """-1 where the tokenizer has none."""
        pad_id = self._id(special.get("pad_token"))
        self.pad_id = self.end_id if pad_id == -1 else pad_id
        self.vocab_size = len(self._table.by_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(
        self, prefix_ids: Sequence[int], token_ids: Sequence[int], *, is_final: bool, skip_special_tokens: bool
    ) -> str:
        """The text that tokens add after a prefix whose text has been told.

        Bytes of a character that is not complete yet are left out, unless no tokens follow.
        """
        decoder = IncrementalDecoder(self._table, skip_special_tokens=skip_special_tokens)
        decoder.push(prefix_ids)
        text = decoder.push(token_ids)
        return text + decoder.finish() if is_final else text

    def _id(self, token: str | None) -> int:
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return -1 if token_id is None else token_id


def _special_tokens(path: Path) -> dict[str, str]:
    """Spellings by role; a spelling is a text, or an object that has it as `content`."""
    if not path.is_file():
        return {}
    roles = json.loads(path.read_text(encoding="utf-8"))
    spellings = {role: roles.get(role) for role in ("eos_token", "pad_token")}
    return {role: each["content"] if isinstance(each, dict) else each for role, each in spellings.items() if each}
