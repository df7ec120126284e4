"""Which fields of the public types are offered, told by the types themselves.

A field declared with `refused(...)` exists so that scripts can be ported and read, and so that using it gives an
error that names it. `check_supported` raises that error; `support_rows` lists all fields for the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from executor.api.errors import UnsupportedFeatureError

_WHY = "refused because"


def refused(default: Any, why: str) -> Any:
    """A dataclass field that may only hold `default`; `why` completes "not supported: ..."."""
    return dataclasses.field(default=default, metadata={_WHY: why})


def check_supported(value: Any, path: str) -> None:
    """Raise `UnsupportedFeatureError` for the first refused field that is set, looking into nested types."""
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        where = f"{path}.{field.name}"
        why = field.metadata.get(_WHY)
        if why is not None and current is not field.default and current != field.default:
            raise UnsupportedFeatureError(f"{where} is not supported: {why}", field=where)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            check_supported(current, where)


def support_rows(cls: type) -> Iterator[tuple[str, str, str]]:
    """(field, `"supported"` or `"refused"`, why) for each field of a public type."""
    for field in dataclasses.fields(cls):
        why = field.metadata.get(_WHY)
        yield field.name, "supported" if why is None else "refused", why or ""
