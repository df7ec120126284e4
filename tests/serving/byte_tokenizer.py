"""A tokenizer directory for tests: token id i is byte i, and two special tokens for chat."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from executor.text import Tokenizer

END_ID = 256
START_ID = 257
VOCAB_SIZE = 258

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write it into a new folder and return that."""
    directory.mkdir()
    vocabulary = {character: byte for byte, character in _characters_of_bytes().items()}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    return directory


def byte_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(directory))


def _characters_of_bytes() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}
