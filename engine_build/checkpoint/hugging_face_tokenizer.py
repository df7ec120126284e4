"""The tokenizer files of a Hugging Face directory, with the chat template always in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from engine_build.checkpoint.interface import CheckpointError, TokenizerFiles
from engine_build.checkpoint.json_file import JsonObject, JsonValue

_TEMPLATE_FIELD = "chat_template"
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
    config = JsonObject.read(config_path) if config_path.is_file() else JsonObject({}, str(config_path))
    template = _chat_template(directory, config)
    files = {
        "tokenizer.json": path.read_bytes(),
        "tokenizer_config.json": json.dumps(_plain_fields(config), ensure_ascii=False, indent=2).encode(),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return TokenizerFiles(files)


def _check_tokenizer(path: Path) -> None:
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer the tokenizers library can read: {error}") from error


def _plain_fields(config: JsonObject) -> dict[str, JsonValue]:
    """Without the template, and special tokens as strings: some directories keep objects with a field `content`."""
    return {
        name: config.object(name).string("content") if name.endswith("_token") and isinstance(value, dict) else value
        for name, value in config.fields.items()
        if name != _TEMPLATE_FIELD
    }


def _chat_template(directory: Path, config: JsonObject) -> str | None:
    """From its own file, or from `tokenizer_config.json`, where it is one string or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not valid UTF-8: {error}") from error
    inline = config.fields.get(_TEMPLATE_FIELD)
    if inline is None or isinstance(inline, str):
        return inline
    for entry in inline if isinstance(inline, list) else []:
        if isinstance(entry, dict) and entry.get("name") == _DEFAULT_TEMPLATE:
            return JsonObject(entry, f"{config.source}: {_TEMPLATE_FIELD}").string("template")
    raise CheckpointError(
        f"{config.source}: {_TEMPLATE_FIELD} is neither a string nor a list with one named {_DEFAULT_TEMPLATE!r}"
    )
