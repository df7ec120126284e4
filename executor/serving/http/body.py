"""Reads JSON bodies field by field, so that every wrong or unknown field is named."""

from __future__ import annotations

import math
from collections.abc import Collection

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError


class Body:
    """A JSON object. Take every field that is known, then `finish`: what is left is refused by name.

    A field that is null counts as not set, as OpenAI's clients mean it.
    """

    def __init__(self, value: object, path: str = "") -> None:
        """Begin with a decoded JSON value; `path` is where it was found, for messages."""
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{path or 'the body'} must be a JSON object", field=path)
        self._fields = {name: field for name, field in value.items() if field is not None}
        self._path = path

    def name(self, field: str) -> str:
        """A field's whole name."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str) -> object:
        """Any JSON value, `None` when not set."""
        return self._fields.pop(field, None)

    def text(self, field: str) -> str | None:
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, value, "a string")
        return value

    def flag(self, field: str) -> bool:
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, value, "true or false")
        return bool(value)

    def integer(self, field: str, *, least: int | None = None) -> int | None:
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self.wrong(field, value, "an integer" if least is None else f"an integer of at least {least}")
        return value

    def number(self, field: str) -> float | None:
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(field, value, "a number")
        return float(value)

    def texts(self, field: str) -> list[str]:
        """A string or a list of strings."""
        value = self.take(field)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self.wrong(field, value, "a string or a list of strings")
        return values

    def integers(self, field: str) -> list[int]:
        value = self.take(field)
        if value is None:
            return []
        if not is_token_ids(value):
            raise self.wrong(field, value, "a list of integers")
        assert isinstance(value, list)
        return value

    def objects(self, field: str) -> list[Body]:
        value = self.take(field)
        if not isinstance(value, list):
            raise self.wrong(field, value, "a list of objects")
        return [Body(item, f"{self.name(field)}[{index}]") for index, item in enumerate(value)]

    def nested(self, field: str) -> Body | None:
        value = self.take(field)
        return None if value is None else Body(value, self.name(field))

    def ignore(self, *fields: str) -> None:
        """Fields that say nothing about the answer."""
        for field in fields:
            self.take(field)

    def only(self, field: str, *values: object) -> None:
        """A field that is known and not offered: it may only have the values that ask for nothing."""
        value = self.take(field)
        if value is not None and not any(value == neutral and type(value) is type(neutral) for neutral in values):
            raise UnsupportedFeatureError(f"{self.name(field)} is not offered", field=self.name(field))

    def finish(self) -> None:
        """Refuse what was not taken."""
        for field in self._fields:
            raise UnsupportedFeatureError(f"{self.name(field)} is not known here", field=self.name(field))

    def wrong(self, field: str, value: object, right: str) -> InvalidRequestError:
        """The error for a field of the wrong kind; long values are not repeated."""
        shown = repr(value)
        return InvalidRequestError(
            f"{self.name(field)} is {shown if len(shown) <= 60 else type(value).__name__}; it must be {right}",
            field=self.name(field),
        )


def is_token_ids(value: object) -> bool:
    """Whether a JSON value is a list of integers."""
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def choice_of(body: Body, field: str, choices: Collection[str]) -> str | None:
    """A string that must be one of `choices`."""
    value = body.text(field)
    if value is not None and value not in choices:
        raise body.wrong(field, value, f"one of {', '.join(choices)}")
    return value
