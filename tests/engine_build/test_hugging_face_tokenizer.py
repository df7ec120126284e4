"""Tokenizer files of a Hugging Face directory, whichever way transformers has kept the template and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from engine_build.checkpoint import CheckpointError
from engine_build.checkpoint.hugging_face_tokenizer import tokenizer_files

_TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def _write_config(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_the_tokenizer_is_passed_on_byte_for_byte(directory: Path) -> None:
    files = tokenizer_files(directory).files
    assert files["tokenizer.json"] == (directory / "tokenizer.json").read_bytes()
    assert json.loads(files["tokenizer_config.json"]) == {}
    assert "chat_template.jinja" not in files


@pytest.mark.parametrize(
    "inline",
    [_TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": _TEMPLATE}]],
)
def test_an_inline_template_moves_to_its_own_file(directory: Path, inline: Any) -> None:
    _write_config(directory, chat_template=inline, eos_token="</s>")
    files = tokenizer_files(directory).files
    assert files["chat_template.jinja"].decode() == _TEMPLATE
    assert json.loads(files["tokenizer_config.json"]) == {"eos_token": "</s>"}


def test_a_template_in_its_own_file_comes_first(directory: Path) -> None:
    _write_config(directory, chat_template="old")
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    assert tokenizer_files(directory).files["chat_template.jinja"].decode() == _TEMPLATE


def test_special_tokens_become_strings(directory: Path) -> None:
    _write_config(directory, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>", pad_token=None)
    config = json.loads(tokenizer_files(directory).files["tokenizer_config.json"])
    assert config == {"bos_token": "<s>", "eos_token": "</s>"}


def _not_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": {}}')


def _only_sentencepiece(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")


def _template_of_no_name(directory: Path) -> None:
    _write_config(directory, chat_template=[{"name": "rag", "template": "x"}])


def _template_in_latin_1(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes("Grüße".encode("latin-1"))


def _token_without_content(directory: Path) -> None:
    _write_config(directory, bos_token={"id": 1})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_not_a_tokenizer, "is not a tokenizer the tokenizers library can read"),
        (_only_sentencepiece, "has tokenizer.model but no tokenizer.json; write one with transformers"),
        (_template_of_no_name, "is neither a string nor a list with one named 'default'"),
        (_template_in_latin_1, "chat_template.jinja is not valid UTF-8"),
        (_token_without_content, "tokenizer_config.json: bos_token has no field 'content', which must be a string"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(directory: Path, damage: Any, said: str) -> None:
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(directory)
    assert said in str(caught.value)
