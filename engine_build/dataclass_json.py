"""Dataclasses from JSON, strictly: no field too many, none too few, each of its declared type.

Understands what a manifest needs: `int`, `float`, `str`, `bool`, `X | Y`, `None`, `tuple[X, ...]`, `dict[str, X]` and
dataclasses of these.
"""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Decoded = TypeVar("Decoded")


class DecodeError(ValueError):
    """A JSON value does not fit: names the field by its path and says what would fit."""


def decode(type_: type[Decoded], value: object, path: str = "") -> Decoded:
    """Build a `type_` from parsed JSON.

    Args:
        type_: a dataclass.
        value: what `json.loads` returned.
        path: where `value` comes from, the beginning of every field name in errors.

    Raises:
        DecodeError: the value has another shape.
    """
    decoded = _decode(type_, value, path)
    assert isinstance(decoded, type_)  # what `_decode` of a class returns
    return decoded


def _decode(type_: Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(type_) and isinstance(type_, type):
        return _decode_dataclass(type_, value, path)
    origin, arguments = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        return _decode_union(arguments, value, path)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], item, _field(path, name)) for name, item in value.items()}
    if type_ is float and type(value) is int:
        return float(value)
    if isinstance(type_, type) and type(value) is type_:  # `type`, not `isinstance`: true is not 1
        return value
    raise DecodeError(f"{path} is {_shown(value)}, it must be {_described(type_)}")


def _decode_dataclass(type_: type, value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise DecodeError(f"{path} is {_shown(value)}, it must be an object")
    types = get_type_hints(type_)
    for name in value:
        if name not in types:
            raise DecodeError(f"{_field(path, name)} is unknown")
    for name in types:
        if name not in value:
            raise DecodeError(f"{_field(path, name)} is missing")
    return type_(**{name: _decode(types[name], item, _field(path, name)) for name, item in value.items()})


def _decode_union(choices: tuple[Any, ...], value: object, path: str) -> object:
    if value is None and NoneType in choices:
        return None
    concrete = [choice for choice in choices if choice is not NoneType]
    if len(concrete) == 1:
        return _decode(concrete[0], value, path)
    if type(value) in concrete:
        return value
    raise DecodeError(f"{path} is {_shown(value)}, it must be {' or '.join(map(_described, choices))}")


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(type_: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if type_ in names:
        return names[type_]
    return "a list" if get_origin(type_) is tuple else "an object"
