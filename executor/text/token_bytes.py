"""The bytes that each token stands for.

Text is bytes first: a character may span tokens and a token may end inside a character. So every token gets its
bytes once, when a tokenizer is loaded, and detokenizing is joining bytes and decoding UTF-8. The two families of
decoders that `tokenizer.json` files of language models declare come down to this:

- byte level (GPT-2, Llama 3, Qwen, SmolLM2): each character of a token is one byte of the GPT-2 alphabet;
- SentencePiece style (Llama 2, Mistral, Gemma): U+2581 is a space, `<0xNN>` is a byte, and one leading space of the
  whole text may be dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as FastTokenizer


class UnsupportedTokenizerError(ValueError):
    """A decoder that is not one of the two families: names it."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes by token id; a number without a token has none, as a model's vocabulary may be padded."""

    by_id: list[bytes]
    special_ids: frozenset[int]
    """Tokens that are left out of text unless asked for."""
    drops_leading_space: bool
    """Whether one space at the start of the text is dropped."""


def token_bytes(tokenizer: FastTokenizer, decoder: dict[str, Any] | None) -> TokenBytes:
    """Make the table.

    Args:
        tokenizer: the loaded tokenizer.
        decoder: the `decoder` entry of its `tokenizer.json`.

    Raises:
        UnsupportedTokenizerError: the decoder is of another family.
    """
    rules = _Rules.read(decoder)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    by_id = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        by_id[token_id] = rules.apply(token)
    special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenBytes(by_id, special, rules.drops_leading_space)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True)
class _Rules:
    """What a decoder does to one token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    drops_leading_space: bool = False

    @classmethod
    def read(cls, decoder: dict[str, Any] | None) -> _Rules:
        rules = cls()
        if decoder is None:
            raise UnsupportedTokenizerError(
                "tokenizer.json has no decoder; it must be ByteLevel or SentencePiece style"
            )
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            rules._add(step)
        return rules

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.byte_level = True
            case {"type": "ByteFallback"}:
                self.byte_fallback = True
            case {"type": "Fuse"}:
                pass  # joining is what bytes do anyway
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self.replacements += ((pattern, content),)
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.drops_leading_space |= start == 1
            case {"type": "Metaspace", "replacement": str(pattern), **rest}:
                self.replacements += ((pattern, " "),)
                self.drops_leading_space |= rest.get("prepend_scheme", "always") != "never"
            case _:
                raise UnsupportedTokenizerError(
                    f"tokenizer.json has the decoder step {step}; offered are ByteLevel, ByteFallback, Fuse, Replace "
                    "of a string, Metaspace, and Strip of one leading space"
                )

    def apply(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_level and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
