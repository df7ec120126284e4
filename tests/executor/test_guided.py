"""Guided decoding: outputs are in their grammar, whatever the logits, the drafts and the stop tokens are."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.api.errors import InvalidRequestError, RequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingParams, GuideType
from executor.api.sampling_config import SamplingConfig
from executor.sampling import NoTokenLeftError, SampledRows, Sampler, SamplingSpec
from executor.text import Tokenizer
from tests.executor.grammar_fixtures import RandomWriter, random_schema
from tests.executor.text_fixtures import byte_level_tokenizer, write_tokenizer

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from executor.sampling.grammar_compiler import GrammarCompiler  # noqa: E402 - after the check that it can be imported

END = 2
PADDED_VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level_tokenizer()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB, [END])
    yield compiler
    compiler.shutdown()


def json_schema(schema: dict[str, Any]) -> GuidedDecodingParams:
    return GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(schema))


def guided(compiler: GrammarCompiler, params: GuidedDecodingParams, **fields: Any) -> SamplingSpec:
    ends = {name: fields.pop(name) for name in ("stop_token_ids", "stop_words") if name in fields}
    end_id = fields.pop("end_id", END)
    grammar = compiler.compile(params).matcher(end_id=end_id, **ends)
    config = fields.pop("config", SamplingConfig(temperature=1.0, seed=1))
    return SamplingSpec(config=config, grammar=grammar, end_id=end_id, **ends, **fields)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_every_output_for_200_schemas_validates(
    tokenizer: Tokenizer, compiler: GrammarCompiler, max_drafts: int
) -> None:
    generator = random.Random(max_drafts)
    schemas = [random_schema(generator, depth % 4) for depth in range(200)]
    specs = [guided(compiler, json_schema(schema), sequence_index=index) for index, schema in enumerate(schemas)]
    outputs = RandomWriter(tokenizer, PADDED_VOCAB, seed=max_drafts).write(specs, {END}, max_drafts=max_drafts)
    for schema, output in zip(schemas, outputs, strict=True):
        text = tokenizer.decode(output)
        validator = jsonschema.validators.Draft202012Validator(schema)
        validator.validate(json.loads(text))


GBNF = """
root ::= greeting " " name
greeting ::= "hello" | "bye"
name ::= [A-Z] [a-z]{1,5}
"""
LARK = 'start: GREETING " " NAME\nGREETING: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,5}/\n'


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        (GuidedDecodingParams(GuideType.REGEX, r"(ab|é)+-[0-9]{2,4}"), r"(ab|é)+-[0-9]{2,4}"),
        (GuidedDecodingParams(GuideType.EBNF_GRAMMAR, GBNF), r"(hello|bye) [A-Z][a-z]{1,5}"),
        (GuidedDecodingParams(GuideType.EBNF_GRAMMAR, LARK), r"(hello|bye) [A-Z][a-z]{1,5}"),
    ],
    ids=["regex", "gbnf", "lark"],
)
def test_outputs_match_their_regex_or_grammar(
    tokenizer: Tokenizer, compiler: GrammarCompiler, params: GuidedDecodingParams, pattern: str
) -> None:
    specs = [guided(compiler, params, sequence_index=index) for index in range(20)]
    texts = [
        tokenizer.decode(output)
        for output in RandomWriter(tokenizer, PADDED_VOCAB, 5).write(specs, {END}, max_drafts=2)
    ]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(set(texts)) > 1


@pytest.mark.parametrize("regex", [r"[\d]\w{2,4}\\d", r"[^\D]\W\d-[\w-]+", r"(\d|[a\d])\\\d"])
def test_digits_and_word_characters_of_a_regex_are_ascii(
    tokenizer: Tokenizer, compiler: GrammarCompiler, regex: str
) -> None:
    """A telephone number once had digits of a faraway script in it."""
    params = GuidedDecodingParams(GuideType.REGEX, regex)
    specs = [guided(compiler, params, sequence_index=index) for index in range(30)]
    outputs = RandomWriter(tokenizer, PADDED_VOCAB, 7).write(specs, {END})
    texts = [tokenizer.decode(output) for output in outputs]
    assert all(re.fullmatch(regex, text, re.ASCII) for text in texts), texts


def test_json_mode_gives_json(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    specs = [guided(compiler, GuidedDecodingParams(GuideType.JSON), sequence_index=index) for index in range(30)]
    for output in RandomWriter(tokenizer, PADDED_VOCAB, 6).write(specs, {END}):
        json.loads(tokenizer.decode(output))


def test_whitespace_between_json_tokens_is_free_but_not_endless(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    params = json_schema({"type": "array", "items": {"type": "integer"}})
    assert accepts(tokenizer, compiler, params, "[1,2]")
    assert accepts(tokenizer, compiler, params, "[ 1,\n\t2 ]")
    assert not accepts(tokenizer, compiler, params, "[" + " " * 40 + "1]")


STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<function=add>",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "end": "</function>",
        },
        {"begin": "<function=time>", "schema": {"enum": ["now", "later"]}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def accepts(tokenizer: Tokenizer, compiler: GrammarCompiler, params: GuidedDecodingParams, text: str) -> bool:
    """Whether greedy sampling, pushed towards `text` at every step, ends up having written it."""
    wanted = [*tokenizer.encode(text), END]
    sampler = Sampler(PADDED_VOCAB)
    sampler.open(0, guided(compiler, params, config=SamplingConfig()))
    for place, token_id in enumerate(wanted):
        logits = np.zeros((1, PADDED_VOCAB), np.float32)
        logits[0, token_id] = 1
        [result] = sampler.sample(logits, [SampledRows(0, wanted[:place], [], 0, 1)])
        if result.token_ids != [token_id]:
            return False
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text", True),
        ('The sum: <function=add>{"a": 12}</function> and <function=time>"now"</function> done', True),
        ("a < b, <functional", True),
        ("<function=sub>{}</function>", False),
        ('<function=add>{"a": "x"}</function>', False),
        ('<function=add>{"a": 1}', False),
    ],
)
def test_text_with_structural_tags_is_free_outside_of_them_and_bound_inside(
    tokenizer: Tokenizer, compiler: GrammarCompiler, text: str, expected: bool
) -> None:
    params = GuidedDecodingParams(GuideType.STRUCTURAL_TAG, json.dumps(STRUCTURAL_TAG))
    assert accepts(tokenizer, compiler, params, text) is expected


def test_a_special_token_can_be_a_trigger(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    guide = {
        "type": "structural_tag",
        "structures": [{"begin": "<|im_start|>", "schema": {"type": "integer"}, "end": "!"}],
        "triggers": ["<|im_start|>"],
    }
    params = GuidedDecodingParams(GuideType.STRUCTURAL_TAG, json.dumps(guide))
    assert accepts(tokenizer, compiler, params, "so <|im_start|>12! then")
    assert not accepts(tokenizer, compiler, params, "so <|im_start|>x")


def test_a_request_may_end_by_a_token_of_its_own_where_the_grammar_ends(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Token 1 instead of the model's end token; special, so it is no part of the text."""
    params = json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})
    specs = [guided(compiler, params, end_id=1, sequence_index=index) for index in range(10)]
    writer = RandomWriter(tokenizer, PADDED_VOCAB, 3)
    for output in writer.write(specs, {1}, max_drafts=2):
        assert output[-1] == 1
        assert END not in output
        json.loads(tokenizer.decode(output))


def test_stop_tokens_and_words_end_the_output_only_where_its_grammar_may_end(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """The stop token `]` is text: it is drawn as a list's last bracket, where the output is complete with it, and not
    inside of a string. The stop word `xy` never ends complete JSON, so it is never written."""
    [bracket] = tokenizer.encode("]")
    stop_word = [*tokenizer.encode("x"), *tokenizer.encode("y")]
    items = {"type": "string", "pattern": "^x[\\]a-z]{1,3}$"}
    params = json_schema({"type": "array", "items": items, "minItems": 1, "maxItems": 4})
    specs = [
        guided(compiler, params, stop_token_ids=[bracket], stop_words=[stop_word], sequence_index=index)
        for index in range(40)
    ]
    outputs = RandomWriter(tokenizer, PADDED_VOCAB, 8).write(specs, {END, bracket}, max_drafts=3)
    for output in outputs:
        json.loads(tokenizer.decode(output))
        assert all(pair != stop_word for pair in map(list, pairwise(output)))
    assert bracket in {output[-1] for output in outputs}


def test_a_grammar_that_ends_before_the_minimum_length_says_so(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    config = SamplingConfig(min_tokens=20)
    sampler = Sampler(PADDED_VOCAB)
    sampler.open(0, guided(compiler, GuidedDecodingParams(GuideType.REGEX, "yes"), config=config))
    tokens = tokenizer.encode("yes")
    [result] = sampler.sample(np.zeros((1, PADDED_VOCAB), np.float32), [SampledRows(0, tokens, [], 0, 1)])
    assert isinstance(result.error, NoTokenLeftError)


def test_a_guided_request_needs_something_that_ends_it(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GuidedDecodingParams(GuideType.REGEX, "a"))
    with pytest.raises(InvalidRequestError, match="needs end_id"):
        grammar.matcher(end_id=None)


def test_tokens_outside_the_grammar_end_only_their_own_request(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """As after a resume with tokens that are not the ones that were drawn."""
    sampler = Sampler(PADDED_VOCAB)
    for request_id in (0, 1):
        sampler.open(request_id, guided(compiler, GuidedDecodingParams(GuideType.REGEX, "abc")))
    rows = [SampledRows(0, tokenizer.encode("z"), [], 0, 1), SampledRows(1, tokenizer.encode("a"), [], 1, 1)]
    broken, fine = sampler.sample(np.zeros((2, PADDED_VOCAB), np.float32), rows)
    assert broken.error is not None
    assert "not what the grammar allows" in broken.error.message
    assert (fine.error, tokenizer.decode(fine.token_ids)[0]) == (None, "b")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "'not' at #"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "'uniqueItems' at #/properties/a"),
        ({"type": "object", "requried": ["a"]}, "'requried' at #"),
        ({"type": "string", "nullable": True}, "'nullable' at #"),
        ({"items": [{"if": {}}]}, "'if' at #/items/0"),
        ({"anyOf": [{"contains": {}}]}, "'contains' at #/anyOf/0"),
        ({"$defs": {"a": {"dependentRequired": {}}}}, "'dependentRequired' at #/$defs/a"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance' at #"),
        ({"type": "string", "format": "regex"}, "format 'regex' at #"),
        ({"type": "string", "format": "unknown"}, "format 'unknown' at #"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
    ids=str,
)
def test_what_a_schema_asks_for_and_cannot_be_enforced_is_refused_by_name(
    compiler: GrammarCompiler, schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        compiler.compile(json_schema(schema))
    assert keyword in caught.value.message
    assert caught.value.field == "guided_decoding_params.guide"


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        (GuideType.JSON_SCHEMA, "{", "is not JSON"),
        (GuideType.JSON_SCHEMA, "[1]", "must be an object, true or false"),
        (GuideType.JSON_SCHEMA, '{"type": "strnig"}', "strnig"),
        (GuideType.JSON_SCHEMA, "false", "no value satisfies"),
        (GuideType.JSON_SCHEMA, '{"allOf": [{"type": "null"}, {"type": "string"}]}', "Unsatisfiable"),
        (GuideType.JSON_SCHEMA, '{"$ref": "https://example.com/x"}', "https://example.com/x"),
        (GuideType.JSON_SCHEMA, None, "is empty; JSON_SCHEMA needs one"),
        (GuideType.REGEX, "a(b", "unclosed group"),
        (GuideType.REGEX, "", "is empty"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "a" foo', "foo"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "a', "is not a grammar"),
        (GuideType.EBNF_GRAMMAR, "start: (", ""),
        (GuideType.EBNF_GRAMMAR, "root ::= root", "never ends"),
        (GuideType.STRUCTURAL_TAG, "{}", "structural_tag"),
        (GuideType.STRUCTURAL_TAG, '{"type": "structural_tag", "structures": [], "triggers": ["<"]}', "structures"),
        (GuideType.STRUCTURAL_TAG, json.dumps(STRUCTURAL_TAG | {"triggers": ["<tool"]}), "must start with one of"),
        (GuideType.STRUCTURAL_TAG, json.dumps(STRUCTURAL_TAG | {"format": {}}), "['format'] are not offered"),
    ],
)
def test_a_bad_guide_is_refused_with_what_is_wrong(
    compiler: GrammarCompiler, kind: GuideType, guide: str | None, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(GuidedDecodingParams(kind, guide))
    assert message in caught.value.message
    assert "<state>" not in caught.value.message


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= "a" root', "start"),
        ('root ::= "x" | "a" more\nmore ::= "c" more', "more"),
        ('root ::= "(" (root | "[" root "]")', "start"),
        ('start: A more\nA: /[a-z]+/\nmore: "b" start | "c" start -> again', "start"),
        ('start: %json {"type": "string"} more\nmore: ("," start)+', "start"),
        ('root ::= item{2,3}\nitem ::= "a" item*  item', "start"),
    ],
)
def test_a_grammar_that_never_ends_is_refused_with_its_rule(compiler: GrammarCompiler, grammar: str, rule: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"rule '{rule}' begins never ends"):
        compiler.compile(GuidedDecodingParams(GuideType.EBNF_GRAMMAR, grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" root?',
        'root ::= "a" root*  "// # root"',
        'root ::= "(" (root | "x") ")" # root',
        'root ::= "a" | "b" root',
        'start: "a" [start] // start',
        'start: %json {"type": "object", "properties": {"start": {}}} | "a" start\n%ignore /[ ]+/',
        'start: "a" start{0,3}\n',
        'start: /a|start/ more\nmore: "b" | /\\/x/ more',
    ],
)
def test_a_grammar_that_may_end_is_taken(compiler: GrammarCompiler, grammar: str) -> None:
    compiler.compile(GuidedDecodingParams(GuideType.EBNF_GRAMMAR, grammar))


def linked(tail: dict[str, Any]) -> dict[str, Any]:
    """An object with a required `next`, which is `tail`."""
    return {"type": "object", "properties": {"next": tail}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (linked({"$ref": "#"}), "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        (
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": linked({"$ref": "#/$defs/a~1b"})}},
            "#/anyOf/1",
        ),
        ({"type": "object", "properties": {"x": linked({"oneOf": [{"$ref": "#/properties/x"}]})}}, "#/properties/x"),
    ],
    ids=str,
)
def test_a_schema_whose_values_never_end_is_refused_with_its_place(
    compiler: GrammarCompiler, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"schema at {re.escape(place)} never ends"):
        compiler.compile(json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        linked({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        linked({"enum": [{"$ref": "#"}]}),
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    ],
    ids=str,
)
def test_a_schema_that_refers_to_itself_and_may_end_is_taken(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiler.compile(json_schema(schema))


def test_a_guide_that_is_too_large_is_refused_before_time_is_spent_on_it(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="200000 bytes"):
        compiler.compile(GuidedDecodingParams(GuideType.REGEX, "a" * 200_000))


def test_equal_guides_are_compiled_once_even_while_the_first_is_compiling(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB, [END], cache_size=2)
    try:
        results: list[object] = []
        params = [json_schema({"enum": list(range(100))}) for _ in range(8)]
        threads = [threading.Thread(target=lambda p=p: results.append(compiler.compile(p))) for p in params]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(result) for result in results}) == 1
        for other in ("b", "c"):
            compiler.compile(GuidedDecodingParams(GuideType.REGEX, other))
        assert compiler.compile(params[0]) is not results[0]
    finally:
        compiler.shutdown()


def test_sequences_of_one_grammar_do_not_share_their_place_in_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(GuidedDecodingParams(GuideType.REGEX, "ab"))
    ahead, behind = grammar.matcher(end_id=END), grammar.matcher(end_id=END)
    ahead.advance(tokenizer.encode("a"))
    masks = np.zeros((2, PADDED_VOCAB // 32), np.uint32)
    ahead.fill_masks(masks[:1], [])
    behind.fill_masks(masks[1:], [])
    assert not np.array_equal(masks[0], masks[1])


def test_a_model_without_an_end_token_offers_no_guided_decoding(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedFeatureError, match="end token"):
        GrammarCompiler(tokenizer, PADDED_VOCAB, [])


def test_without_llguidance_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.sampling.guided import open_grammar_compiler

    monkeypatch.setitem(sys.modules, "llguidance", None)
    for name in ("executor.sampling.grammar", "executor.sampling.grammar_compiler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UnsupportedFeatureError, match=r"inflight-executor\[guided\]"):
        open_grammar_compiler(tokenizer, PADDED_VOCAB, [END])
