"""Finds grammars and schemas that an output can enter and never leave: `root ::= "a" root` has no last token.

llguidance compiles them. An output would go on until `max_tokens` and be no text of its grammar, so they are refused.
What ends is what can be derived without going in circles: a rule ends when one of its alternatives is made of strings
and of rules that end, and a schema when the values that it requires do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from executor.api.errors import InvalidRequestError

_FIELD = "guided_decoding_params.guide"

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*"i?|/(?!/)(?:\\.|[^/\\])+/[a-z]*|<[^>\s]*>|\d+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<mark>%[a-z_]+|->|\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_HEAD = re.compile(r"^[?!]?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\.-?\d+)?\s*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_CLOSING = {"(": ")", "[": "]"}


class _Alternatives(NamedTuple):
    """What a rule or a group may be: one of these, each a sequence of names that it needs and groups."""

    sequences: list[list[str | _Alternatives]]

    def ends(self, is_ending: Callable[[str], bool]) -> bool:
        return any(
            all(is_ending(part) if isinstance(part, str) else part.ends(is_ending) for part in sequence)
            for sequence in self.sequences
        )


def check_lark_ends(lark: str) -> None:
    """Raise `InvalidRequestError` for a grammar in Lark that has a rule without an end. What is not understood counts
    as ending: llguidance checks the rest."""
    heads = list(_HEAD.finditer(lark))
    ends = [head.start() for head in heads[1:]] + [len(lark)]
    rules = {head["name"]: _parse(list(_tokens(lark[head.end() : end]))) for head, end in zip(heads, ends, strict=True)}
    endless = _without_end(rules, lambda rule, is_ending: rule.ends(is_ending))
    if endless:
        raise InvalidRequestError(
            f"{_FIELD} is refused: what rule '{endless[0]}' begins never ends; it needs an alternative that does not "
            "lead back to it",
            field=_FIELD,
        )


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(kind, text) up to a directive at the beginning of a line; `%json {...}` and its like are one text."""
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None, "any character is a mark"
        position = match.end()
        kind = match.lastgroup or ""
        if kind == "mark" and match[0].startswith("%") and len(match[0]) > 1:
            _, is_later_line, before = text[: match.start()].rpartition("\n")
            if is_later_line and not before.strip():
                return
            position = _end_of_block(text, position)
            kind = "text"
        if kind != "skip":
            yield kind, match[0]


def _end_of_block(text: str, begin: int) -> int:
    """Behind the braces that open at `begin`."""
    depth = 0
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0 and not text[position].isspace():
            return position + 1
    return len(text)


def _parse(tokens: list[tuple[str, str]]) -> _Alternatives:
    """Reads alternatives up to a closing bracket, and takes them off the front of `tokens`."""
    sequences: list[list[str | _Alternatives]] = [[]]
    while tokens:
        kind, text = tokens.pop(0)
        if kind == "mark" and text in _CLOSING.values():
            break
        if text == "|":
            sequences.append([])
        elif text == "->":
            del tokens[:1]  # the alias's name
        elif kind == "name" or text in _CLOSING:
            part: str | _Alternatives = text if kind == "name" else _parse(tokens)
            if text != "[" and not _is_optional(tokens):
                sequences[-1].append(part)
    return _Alternatives(sequences)


def _is_optional(tokens: list[tuple[str, str]]) -> bool:
    """Whether what comes next lets the part before be left out; takes it off `tokens`."""
    following = [text for _, text in tokens[:2]]
    if following[:1] in (["?"], ["*"]):
        return True
    return following in (["~", "0"], ["{", "0"], ["{", ","])


def check_schema_ends(schema: dict[str, Any]) -> None:
    """Raise `InvalidRequestError` for a JSON schema, part of which only endless values
    satisfy, as an object that requires another one like it."""
    schemas = dict(_subschemas(schema, "#"))
    endless = _without_end(schemas, _value_ends)
    if endless:
        raise InvalidRequestError(
            f"{_FIELD} is refused: a value of the schema at {endless[0]} never ends, since it requires another one "
            "like it",
            field=_FIELD,
        )


def _subschemas(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a schema by its JSON pointer; what is no schema does no harm."""
    if isinstance(value, dict):
        yield path, _Located(value, path)
        for name, item in value.items():
            if name not in ("enum", "const", "default", "examples"):
                yield from _subschemas(item, f"{path}/{name.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _subschemas(item, f"{path}/{index}")


class _Located(NamedTuple):
    schema: dict[str, Any]
    path: str


def _value_ends(located: _Located, is_ending: Callable[[str], bool]) -> bool:
    """Whether a value of a schema ends, where those of the schemas in it do as `is_ending` says."""
    schema, path = located
    if "enum" in schema or "const" in schema:
        return True
    needed = [f"{path}/allOf/{index}" for index in range(_length(schema.get("allOf")))]
    if isinstance(schema.get("$ref"), str):
        needed.append(schema["$ref"])
    if schema.get("type") in ("object", ["object"]):
        required = schema.get("required")
        needed += [f"{path}/properties/{name}" for name in required or () if isinstance(name, str)]
    if schema.get("type") in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        num_given = _length(schema.get("prefixItems"))
        needed += [f"{path}/prefixItems/{index}" for index in range(min(num_given, schema["minItems"]))]
        if schema["minItems"] > num_given:
            needed.append(f"{path}/items")
    if not all(map(is_ending, needed)):
        return False
    return all(
        any(is_ending(f"{path}/{keyword}/{index}") for index in range(_length(schema[keyword])))
        for keyword in ("anyOf", "oneOf")
        if _length(schema.get(keyword))
    )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _without_end(parts: dict[str, Any], ends: Callable[[Any, Callable[[str], bool]], bool]) -> list[str]:
    """Names of the parts that do not end. Each round finds those that end with what was found before; names that are
    not among `parts` end."""
    endless = dict.fromkeys(parts)
    while True:
        found = [name for name in endless if ends(parts[name], lambda other: other not in endless)]
        if not found:
            return list(endless)
        for name in found:
            del endless[name]
