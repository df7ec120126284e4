"""Tokenizing, detokenizing, chat templates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from executor.text import ChatTemplate, ChatTemplateError, MissingChatTemplateError, Tokenizer, TokenizerError
from tests.executor.text_fixtures import CHAT_TEMPLATE, byte_fallback_tokenizer, byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def fast() -> FastTokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(fast: FastTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), fast))


token_ids = st.lists(st.integers(0, 599), max_size=40)


@given(ids=token_ids, skip=st.booleans())
def test_any_byte_level_token_ids_decode_as_the_tokenizers_library_does(
    tokenizer: Tokenizer, fast: FastTokenizer, ids: list[int], skip: bool
) -> None:
    assert tokenizer.decode(ids, skip_special_tokens=skip) == fast.decode(ids, skip_special_tokens=skip)


@given(ids=token_ids, cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_pieces_joined_equal_the_text_at_once_however_the_tokens_come(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    begins = [0, *sorted(cuts), len(ids)]
    pieces = [decoder.push(ids[begin:end]) for begin, end in pairwise(begins) if begin <= end]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text())
def test_a_text_of_single_byte_tokens_comes_back_and_never_shows_a_replacement_character_on_the_way(
    tokenizer: Tokenizer, text: str
) -> None:
    alphabet = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    decoder = tokenizer.incremental_decoder()
    pieces = [decoder.push([alphabet[bytes([byte])]]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert decoder.finish() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(text=st.text())
def test_encoding_and_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_character_left_incomplete_becomes_one_replacement_character_at_the_end(tokenizer: Tokenizer) -> None:
    alphabet = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    decoder = tokenizer.incremental_decoder()
    assert [decoder.push([alphabet[bytes([byte])]]) for byte in "🌍".encode()[:3]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, 10_000]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""


@pytest.mark.parametrize("strips", [False, True])
@given(ids=st.lists(st.integers(0, 269), max_size=12))
def test_valid_sentencepiece_style_text_decodes_as_the_tokenizers_library_does(strips: bool, ids: list[int]) -> None:
    """Where a run of byte tokens is not UTF-8 as a whole, the library loses its valid characters too; they are kept."""
    fast, tokenizer = _SENTENCEPIECE[strips]
    expected = fast.decode(ids)
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids) == expected
    else:
        assert "\ufffd" in tokenizer.decode(ids)


@pytest.fixture(scope="module", autouse=True)
def _sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> None:
    for strips in (False, True):
        fast = byte_fallback_tokenizer(strips_leading_space=strips)
        _SENTENCEPIECE[strips] = fast, Tokenizer(write_tokenizer(tmp_path_factory.mktemp("sp"), fast))


_SENTENCEPIECE: dict[bool, tuple[FastTokenizer, Tokenizer]] = {}


def test_only_the_first_space_of_a_whole_text_is_dropped() -> None:
    _, tokenizer = _SENTENCEPIECE[True]
    decoder = tokenizer.incremental_decoder()
    the = tokenizer.token_id("▁the")
    assert the is not None
    assert [decoder.push([token_id]) for token_id in (1, the, the)] == ["", "the", " the"]


def test_special_tokens_are_known_by_role_and_have_text_only_on_demand(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 2]
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""


def test_a_chat_is_rendered_and_its_special_tokens_become_tokens(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    text = "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(messages)[0] == 1
    assert tokenizer.render_chat(messages, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_template_that_refuses_a_conversation_is_quoted(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="refuses the conversation: unknown role wizard"):
        tokenizer.render_chat([{"role": "wizard", "content": "x"}])


def test_a_model_without_a_template_says_so(fast: FastTokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, fast, chat_template=None))
    with pytest.raises(MissingChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_can_neither_reach_the_interpreter_nor_change_what_it_is_given(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="fails on the conversation"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_malformed_template_is_refused_with_its_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("ok\n{% for %}", {})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<ü>"}'),
        ("{{ messages[0].content | tojson(indent=2) }}", '"<ü>"'),
        ("{{ bos_token }}{% generation %}x{% endgeneration %}", "<s>x"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("  {% if true %}\na\n{% endif %}\n", "a\n"),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_the_names_that_published_templates_use(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<ü>"}]) == expected


def test_templates_render_as_transformers_renders_them() -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "ü"\n<b>'}]
    sources = [
        CHAT_TEMPLATE,
        "{{ messages | tojson(indent=4) }}",
        "{% for m in messages %}\n {{ m.content }}\n{% endfor %}",
    ]
    for source in sources:
        expected, _ = rendering.render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
        assert ChatTemplate(source, {}).render(messages) == expected[0]


def test_a_broken_directory_is_refused_by_file(fast: FastTokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    directory = write_tokenizer(tmp_path, fast)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json holds no JSON object"):
        Tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(directory)


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    fast = byte_level_tokenizer()
    fast.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(write_tokenizer(tmp_path, fast))
