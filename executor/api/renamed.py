"""Fields under names that TensorRT-LLM's bindings gave up, for scripts that still use them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def renamed(**names: str) -> Callable[[type[_T]], type[_T]]:
    """Let a class take old names, `renamed(old="new")`, in its constructor and as attributes.

    Using one is a `DeprecationWarning`. Where both are given the new name wins, as it did upstream.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        make: Callable[..., None] = cls.__init__

        @functools.wraps(make)
        def init(self: _T, *args: Any, **fields: Any) -> None:
            for old in names.keys() & fields.keys():
                _warn(cls, old, names[old])
                value = fields.pop(old)
                if fields.get(names[old]) is None:
                    fields[names[old]] = value
            make(self, *args, **fields)

        cls.__init__ = init  # type: ignore[assignment, method-assign]
        for old, new in names.items():
            setattr(cls, old, _alias(cls, old, new))
        return cls

    return decorate


def _alias(cls: type, old: str, new: str) -> property:
    def get(self: Any) -> Any:
        _warn(cls, old, new)
        return getattr(self, new)

    def put(self: Any, value: Any) -> None:
        _warn(cls, old, new)
        setattr(self, new, value)

    return property(get, put, doc=f"Old name of `{new}`.")


def _warn(cls: type, old: str, new: str) -> None:
    warnings.warn(f"{cls.__name__}.{old} is an old name; write {new}", DeprecationWarning, stacklevel=3)
