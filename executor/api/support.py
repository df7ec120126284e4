"""Which fields of the public types are offered, told by the types themselves.

A field declared with `refused(...)` exists so that scripts can be ported and read, and so that using it gives an
error that names it; `refused_members(...)` does the same for enumerations. One declared with `accepted(...)` may hold
anything: it asks for what is the case anyway. `never_set(...)` is for fields of results that stay empty,
`supported(...)` for what needs a word of explanation, `addition(...)` for what TensorRT-LLM's bindings did not have.

`check_supported` raises that error; `support_rows` lists all fields for the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from typing import Any, NamedTuple, TypeVar

from executor.api.errors import UnsupportedFeatureError

_SUPPORT = "support"
_REASON = "reason"

_AnyEnum = TypeVar("_AnyEnum", bound=Enum)
_refused_members: dict[tuple[type[Enum], str], str] = {}


class Support(StrEnum):
    """What becomes of a field."""

    SUPPORTED = "supported"
    ACCEPTED = "no effect"
    REFUSED = "refused"
    NEVER_SET = "never set"
    ADDITION = "addition"


class SupportRow(NamedTuple):
    """One line of the documentation's table."""

    name: str
    support: Support
    reason: str
    """Why that is so; empty where there is nothing to explain."""


def refused(default: Any, why: str) -> Any:
    """A dataclass field that may only hold `default`; `why` completes "not supported: ..."."""
    return dataclasses.field(default=default, metadata={_SUPPORT: Support.REFUSED, _REASON: why})


def accepted(default: Any, why: str) -> Any:
    """A dataclass field that changes nothing whatever it holds; `why` says why nothing needs to change."""
    return dataclasses.field(default=default, metadata={_SUPPORT: Support.ACCEPTED, _REASON: why})


def supported(default: Any, note: str) -> Any:
    """A dataclass field with something to know about what is supported of it."""
    return dataclasses.field(default=default, metadata={_SUPPORT: Support.SUPPORTED, _REASON: note})


def never_set(default: Any = dataclasses.MISSING, why: str = "", *, default_factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field of a result that always holds its default; `why` says why nothing fills it."""
    return dataclasses.field(
        default=default, default_factory=default_factory, metadata={_SUPPORT: Support.NEVER_SET, _REASON: why}
    )


def addition(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that TensorRT-LLM's bindings did not have."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata={_SUPPORT: Support.ADDITION})


def refused_members(**why: str) -> Callable[[type[_AnyEnum]], type[_AnyEnum]]:
    """Members of an enumeration that may be named but not asked for, each with what completes "not supported: ..."."""

    def decorate(cls: type[_AnyEnum]) -> type[_AnyEnum]:
        for name, reason in why.items():
            _refused_members[cls, cls[name].name] = reason
        return cls

    return decorate


def check_supported(value: Any, path: str) -> None:
    """Look for what is not offered, into nested types.

    Args:
        value: a dataclass of the public types.
        path: how the error calls it.

    Raises:
        UnsupportedFeatureError: names the first refused field that is set, and why it is refused.
    """
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        where = f"{path}.{field.name}"
        if field.metadata.get(_SUPPORT) is Support.REFUSED and _is_set(current, field.default):
            raise UnsupportedFeatureError(f"{where} is not supported: {field.metadata[_REASON]}", field=where)
        if isinstance(current, Enum):
            why = _refused_members.get((type(current), current.name))
            if why is not None:
                raise UnsupportedFeatureError(f"{where} {current.name} is not supported: {why}", field=where)
        elif dataclasses.is_dataclass(current) and not isinstance(current, type):
            check_supported(current, where)


def _is_set(current: Any, default: Any) -> bool:
    if default is None:  # what is compared may be a tensor, whose `!=` is no bool
        return current is not None and current is not False  # False asks for nothing
    return current is not default and bool(current != default)


def support_rows(cls: Any) -> Iterator[SupportRow]:
    """A row for each field of a public dataclass, or for each member of an enumeration."""
    if issubclass(cls, Enum):
        for member in cls:
            why = _refused_members.get((cls, member.name))
            yield SupportRow(member.name, Support.SUPPORTED if why is None else Support.REFUSED, why or "")
        return
    for field in dataclasses.fields(cls):
        support = field.metadata.get(_SUPPORT, Support.SUPPORTED)
        yield SupportRow(field.name, support, field.metadata.get(_REASON, ""))
