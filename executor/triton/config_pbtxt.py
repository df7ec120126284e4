"""`config.pbtxt`: the protobuf text format of Triton's model configurations, written and read.

A message is a dict; a field that may occur several times holds a list. Words without quotes (`TYPE_INT32`, `KIND_CPU`)
are `Word`s, so that they are written as they were read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigSyntaxError(ValueError):
    """The text is not protobuf's text format: says where, and what was expected."""


class Word(str):
    """The name of an enumeration's member, or a template's `${...}`."""


_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*\s*)*(?:
        (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>\$\{[^}\n]*\}|[A-Za-z_][\w.]*)
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<mark>[{}\[\]<>:,;])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_REPEATED = frozenset(
    {"input", "output", "instance_group", "step", "dims", "shape", "preferred_batch_size", "gpus", "optimization"}
)
_MAPS = frozenset({"parameters", "input_map", "output_map", "metric_tags"})
"""Fields that are maps: `key` and `value` each."""


def read_config(text: str) -> dict[str, Any]:
    """The message that a text says.

    Raises:
        ConfigSyntaxError: it says none.
    """
    return _message(_Tokens(text), "")


def write_config(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    return "\n".join(_lines(message)) + "\n"


class _Tokens:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self.kind = ""
        self.value = ""
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            raise self.error("a name, a value or a bracket")
        self._position = match.end()
        self.kind = match.lastgroup or ""
        self.value = match[self.kind]

    def takes(self, mark: str) -> bool:
        """Whether the token is this mark, which is then left behind."""
        if self.kind == "mark" and self.value == mark:
            self.advance()
            return True
        return False

    def error(self, expected: str) -> ConfigSyntaxError:
        line = self._text.count("\n", 0, self._position) + 1
        return ConfigSyntaxError(f"line {line}: expected {expected}, found {self.value!r}")


def _message(tokens: _Tokens, end: str) -> dict[str, Any]:
    """The fields up to `end`, or to the end of the text where that is empty."""
    message: dict[str, Any] = {}
    while not (tokens.takes(end) if end else tokens.kind == "end"):
        if tokens.kind != "word":
            raise tokens.error(f"the name of a field{' or ' + end if end else ''}")
        name = tokens.value
        tokens.advance()
        has_colon = tokens.takes(":")
        _add(message, name, _values(tokens, has_colon))
        while tokens.takes(",") or tokens.takes(";"):
            pass
    return message


def _add(message: dict[str, Any], name: str, values: list[Any]) -> None:
    if name in _MAPS:
        entries = message.setdefault(name, {})
        entries.update({value["key"]: value.get("value", "") for value in values})
    elif name in _REPEATED:
        message.setdefault(name, []).extend(values)
    elif len(values) == 1:
        message[name] = values[0]
    else:
        message[name] = values


def _values(tokens: _Tokens, has_colon: bool) -> list[Any]:
    """One value, or those of a list."""
    if not tokens.takes("["):
        return [_value(tokens, has_colon)]
    values = []
    while not tokens.takes("]"):
        values.append(_value(tokens, has_colon=True))
        tokens.takes(",")
    return values


def _value(tokens: _Tokens, has_colon: bool) -> Any:
    for begin, end in (("{", "}"), ("<", ">")):
        if tokens.takes(begin):
            return _message(tokens, end)
    kind, text = tokens.kind, tokens.value
    if not has_colon or kind not in ("string", "word", "number"):
        raise tokens.error("a value")
    tokens.advance()
    if kind == "string":
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1])
    if kind == "number":
        return float(text) if any(mark in text for mark in ".eE") else int(text)
    return {"true": True, "True": True, "false": False, "False": False}.get(text, Word(text))


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterable[str]:
    for name, value in message.items():
        if name in _MAPS:
            for key, entry in value.items():
                yield from _field(name, {"key": key, "value": entry}, indent)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for entry in value:
                yield from _field(name, entry, indent)
        else:
            yield from _field(name, value, indent)


def _field(name: str, value: Any, indent: str) -> Iterable[str]:
    if isinstance(value, Mapping):
        yield f"{indent}{name} {{"
        yield from _lines(value, indent + "  ")
        yield f"{indent}}}"
    elif isinstance(value, list):
        yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]"
    else:
        yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Word) or not isinstance(value, str):
        return str(value)
    escaped = (
        value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )
    return f'"{escaped}"'
