"""The tokenizer of an engine directory.

```
ENGINE_DIR/tokenizer/tokenizer.json          read by the `tokenizers` library
                     tokenizer_config.json   special tokens by role
                     chat_template.jinja     where the checkpoint has one
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from executor.text.chat_template import ChatTemplate, MissingChatTemplateError
from executor.text.incremental_decoder import IncrementalDecoder
from executor.text.token_bytes import TokenBytes, UnsupportedTokenizerError, token_bytes


class TokenizerError(ValueError):
    """The tokenizer directory cannot be used: names the file and what is wrong with it."""


class Tokenizer:
    """Text to token ids and back. Immutable after loading, and thread-safe."""

    def __init__(self, tokenizer_dir: str | PathLike[str]) -> None:
        """Load.

        Raises:
            TokenizerError: a file is missing or malformed.
            ChatTemplateError: the chat template is not valid jinja2.
        """
        directory = Path(tokenizer_dir)
        path = directory / "tokenizer.json"
        try:
            self.json = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        try:
            self._tokenizer = FastTokenizer.from_str(self.json)
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{path} is not a tokenizer the tokenizers library can read: {error}") from error
        try:
            self._table: TokenBytes = token_bytes(self._tokenizer, json.loads(self.json)["decoder"])
        except UnsupportedTokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        spellings = self._tokenizer.get_added_tokens_decoder().values()  # matched in text as they are
        self._max_token_bytes = max(
            (len(token) for token in (*self._table.by_id, *(token.content.encode() for token in spellings))), default=0
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = _special_tokens(directory / "tokenizer_config.json")
        """By role: `eos_token`, `bos_token`, ..."""
        template = directory / "chat_template.jinja"
        self.chat_template: ChatTemplate | None = None
        """`None` where the model has none."""
        if template.is_file():
            self.chat_template = ChatTemplate(template.read_text(encoding="utf-8"), self.special_tokens)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. A model's vocabulary may be larger: padded."""
        return len(self._table.by_id)

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token stands for."""
        return self._max_token_bytes

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokenizer's own end token. A model's configuration may name more."""
        eos = self.special_tokens.get("eos_token")
        token_id = None if eos is None else self.token_id(eos)
        return [] if token_id is None else [token_id]

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that have no text where special tokens are skipped."""
        return self._table.special_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own spelling; `None` where there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: possibly a part of a character, nothing for an id without a token."""
        return self._table.by_id[token_id] if 0 <= token_id < len(self._table.by_id) else b""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in it become those tokens.

        Args:
            text: valid Unicode, no lone surrogates.
            add_special_tokens: whether the tokens that the tokenizer puts around every text are added; leave them out
                for a rendered chat, which has its own.
        """
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; U+FFFD where their bytes are not UTF-8."""
        decoder = self.incremental_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.finish()

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one output."""
        return IncrementalDecoder(self._table, skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            MissingChatTemplateError: the model has no template.
            ChatTemplateError: the template refuses the conversation.
        """
        return self.encode(
            self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt),
            add_special_tokens=False,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text.

        Raises:
            MissingChatTemplateError: the model has no template.
            ChatTemplateError: the template refuses the conversation.
        """
        if self.chat_template is None:
            raise MissingChatTemplateError("this model has no chat template; send text or token ids")
        return self.chat_template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def _special_tokens(path: Path) -> dict[str, str]:
    """Strings by role, from the entries whose names end in `_token`; none where there is no file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
