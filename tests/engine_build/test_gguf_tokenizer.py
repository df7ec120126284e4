"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine_build.checkpoint import CheckpointError, TokenizerFiles
from engine_build.checkpoint.gguf_file import GgufFile
from engine_build.checkpoint.gguf_tokenizer import merges_from_scores, tokenizer_files

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = ["a", "b", "c", "▁", "▁a", "ab", "bc", "abc", "▁ab", "cab", "▁▁", "é", "▁b", "cc", "ca"]
_SPM_TOKENS = ["<unk>", "<s>", "</s>", *_BYTES, "<think>", *_WORDS]
_SPM_SCORES = [0.0] * (3 + 256 + 1) + [-float(rank) for rank in (90, 91, 92, 93, 1, 4, 2, 7, 5, 3, 6, 94, 8, 10, 9)]
_SPM_TYPES = [2, 3, 3, *[6] * 256, 4, *[1] * len(_WORDS)]

_ALPHABET = ["a", "b", "1", "2", "Ġ", "Ċ", "!", "'", "s"]
_BPE_TOKENS = ["<|end|>", "<|start|>", *_ALPHABET, "ab", "Ġa", "12", "ĠĠ", "!!", "'s", "Ġab", "aab"]
_BPE_MERGES = ["a b", "Ġ a", "1 2", "Ġ Ġ", "! !", "' s", "Ġ ab"]
_BPE_TYPES = [3, 3, *[1] * (len(_BPE_TOKENS) - 2)]

_FUZZED = settings(deadline=None, max_examples=200)


def _write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def _sentencepiece(path: Path, *, space_prefix: bool | None = None) -> TokenizerFiles:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(_SPM_TOKENS)
        writer.add_token_scores(_SPM_SCORES)
        writer.add_token_types(_SPM_TYPES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if space_prefix is not None:
            writer.add_add_space_prefix(space_prefix)

    return tokenizer_files(_write(path, fill))


def _byte_level(path: Path, variant: str | None = "smollm", tokens: list[str] | None = None) -> TokenizerFiles:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if variant is not None:
            writer.add_tokenizer_pre(variant)
        writer.add_token_list(tokens or _BPE_TOKENS)
        writer.add_token_types(_BPE_TYPES)
        writer.add_token_merges(_BPE_MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)

    return tokenizer_files(_write(path, fill))


def _tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(files.files["tokenizer.json"].decode())


def _config(files: TokenizerFiles) -> dict[str, object]:
    content = json.loads(files.files["tokenizer_config.json"])
    assert isinstance(content, dict)
    return content


def _merge_as_sentencepiece_does(text: str) -> list[str]:
    """The definition: of all neighbours that make a token, join the best scored, leftmost first, until none is left."""
    scores = {
        token: score for token, score, type_ in zip(_SPM_TOKENS, _SPM_SCORES, _SPM_TYPES, strict=True) if type_ == 1
    }
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[left + right], position)
            for position, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not joined:
            break
        _, position = min(joined)
        pieces[position : position + 2] = [pieces[position] + pieces[position + 1]]
    in_bytes = [[piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return [piece for pieces_of_one in in_bytes for piece in pieces_of_one]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tokenizer(_sentencepiece(tmp_path_factory.mktemp("spm") / "m.gguf"))


@_FUZZED
@given(text=st.text(st.sampled_from("abc é\nx🌍"), min_size=1, max_size=24))
def test_merging_by_score_is_what_sentencepiece_does(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.encode(text, add_special_tokens=False).tokens == _merge_as_sentencepiece_does(text)


@_FUZZED
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=24))
def test_sentencepiece_text_comes_back(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False).ids
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_texts_begin_with_the_begin_token(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("ab").tokens == ["<s>", "▁ab"]


def test_control_and_user_defined_tokens_are_found_whole_in_text(sentencepiece: Tokenizer) -> None:
    encoded = sentencepiece.encode("ab</s>a<think>b", add_special_tokens=False)
    assert encoded.tokens == ["▁ab", "</s>", "▁a", "<think>", "▁b"]
    assert sentencepiece.decode(encoded.ids, skip_special_tokens=True) == "ab a<think> b"


def test_a_file_can_ask_for_no_space_in_front(tmp_path: Path) -> None:
    tokenizer = _tokenizer(_sentencepiece(tmp_path / "m.gguf", space_prefix=False))
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False).ids) == " ab"


def test_merges_are_ordered_by_the_score_of_their_result() -> None:
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "bc": -1.0, "ab": -2.0, "abc": -3.0}
    assert merges_from_scores(scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("variant", "text", "tokens"),
    [
        ("smollm", "  12", ["ĠĠ", "1", "2"]),  # digits stand alone, spaces stay together
        ("gpt-2", "  12", ["Ġ", "Ġ", "12"]),  # the last space belongs to the number
        ("llama-bpe", "a's!!\n", ["a", "'s", "!!", "Ċ"]),
        ("llama-bpe", "12 12", ["12", "Ġ", "12"]),  # up to three digits together, no space with them
        ("qwen2", "12", ["1", "2"]),
        ("tekken", "12", ["1", "2"]),
        ("gpt-2", "aab", ["a", "ab"]),
        ("llama-bpe", "aab", ["aab"]),  # a word that is a token needs no merges
        ("smollm", "ab<|end|>ab", ["ab", "<|end|>", "ab"]),
    ],
)
def test_each_variant_cuts_text_its_own_way(tmp_path: Path, variant: str, text: str, tokens: list[str]) -> None:
    tokenizer = _tokenizer(_byte_level(tmp_path / "m.gguf", variant))
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_special_tokens_and_the_chat_template_are_carried_over(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(_BPE_TOKENS)
        writer.add_token_types(_BPE_TYPES)
        writer.add_token_merges(_BPE_MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_chat_template("{{ messages[0]['content'] }}")

    files = tokenizer_files(_write(tmp_path / "m.gguf", fill))
    config = _config(files)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|start|>", "<|end|>", "<|end|>")
    assert files.files["chat_template.jinja"] == b"{{ messages[0]['content'] }}"
    assert _tokenizer(files).encode("ab").tokens == ["<|start|>", "ab", "<|end|>"]


@pytest.mark.parametrize(("variant", "adds"), [("smollm", False), ("llama-bpe", True)])
def test_only_some_variants_put_the_begin_token_in_front_unasked(tmp_path: Path, variant: str, adds: bool) -> None:
    files = _byte_level(tmp_path / "m.gguf", variant)
    assert _config(files)["add_bos_token"] is adds
    assert (_tokenizer(files).encode("ab").tokens[0] == "<|start|>") is adds


@pytest.mark.parametrize(
    ("variant", "tokens", "said"),
    [
        ("deepseek-v9", None, "tokenizer.ggml.pre 'deepseek-v9' is not supported; supported are"),
        (None, None, "has no metadata tokenizer.ggml.pre"),
        ("smollm", ["a", "a", *_BPE_TOKENS[2:]], "names a token twice"),
        ("smollm", _BPE_TOKENS[:-1], f"{len(_BPE_TOKENS) - 1} tokens but {len(_BPE_TOKENS)} token types"),
        ("smollm", ["x" if token == "ab" else token for token in _BPE_TOKENS], "merge 'a b' is of tokens that are not"),
    ],
)
def test_a_damaged_tokenizer_is_refused(
    tmp_path: Path, variant: str | None, tokens: list[str] | None, said: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        _byte_level(tmp_path / "m.gguf", variant, tokens)
    assert said in str(caught.value)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])
        writer.add_token_types([1])

    with pytest.raises(CheckpointError, match="tokenizer 'bert' is not supported; supported are 'gpt2' and 'llama'"):
        tokenizer_files(_write(tmp_path / "m.gguf", fill))


def test_a_file_without_a_tokenizer_has_no_tokenizer_files(tmp_path: Path) -> None:
    assert tokenizer_files(_write(tmp_path / "m.gguf", lambda writer: writer.add_name("bare"))).files == {}
