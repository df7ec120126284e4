"""The tokenizer files of a Hugging Face directory, with the chat template always in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from engine_build.checkpoint.interface import CheckpointError, TokenizerFiles
from engine_build.checkpoint.json_file import JsonObject, JsonValue

_DEFAULT_TEMPLATE = "default"


def tokenizer_files(directory: Path) -> TokenizerFiles:
    """Collect them; empty when the directory has no tokenizer at all.

    Raises:
        CheckpointError: the tokenizer is malformed or only there in SentencePiece's own format.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        if (directory / "tokenizer.model").is_file():
            raise CheckpointError(
                f"{directory} has tokenizer.model but no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        return TokenizerFiles()
    _check_tokenizer(path)
    config_path = directory / "tokenizer_config.json"
    config = dict(JsonObject.read(config_path).fields) if config_path.is_file() else {}
    inline_template = config.pop("chat_template", None)
    files = {
        "tokenizer.json": path.read_bytes(),
        "tokenizer_config.json": json.dumps(_plain_tokens(config), ensure_ascii=False, indent=2).encode(),
    }
    template = _chat_template(directory, inline_template)
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return TokenizerFiles(files)


def _check_tokenizer(path: Path) -> None:
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer the tokenizers library can read: {error}") from error


def _plain_tokens(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Special tokens as strings; some directories keep them as objects with the string under `content`."""
    return {
        name: value["content"] if name.endswith("_token") and isinstance(value, dict) else value
        for name, value in config.items()
    }


def _chat_template(directory: Path, inline: JsonValue) -> str | None:
    """From its own file, or from `tokenizer_config.json`, where it is one string or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not valid UTF-8: {error}") from error
    if inline is None or isinstance(inline, str):
        return inline
    named = (
        {entry.get("name"): entry.get("template") for entry in inline if isinstance(entry, dict)}
        if isinstance(inline, list)
        else {}
    )
    template = named.get(_DEFAULT_TEMPLATE)
    if not isinstance(template, str):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a string nor a list with one named "
            f"{_DEFAULT_TEMPLATE!r}"
        )
    return template
