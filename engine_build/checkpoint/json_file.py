"""JSON objects from files, with the type of every field checked where it is read."""

from __future__ import annotations

import json
from pathlib import Path

from engine_build.checkpoint.interface import CheckpointError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


class JsonObject:
    """The object in a JSON file, or one inside it. A field that is null counts as absent."""

    def __init__(self, fields: dict[str, JsonValue], source: str) -> None:
        self.fields: dict[str, JsonValue] = {name: value for name, value in fields.items() if value is not None}
        self.source = source

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """Raises `CheckpointError` when the file is missing or is not a JSON object."""
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, it must hold an object")
        return cls(content, str(path))

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def integer(self, name: str, default: int | None = None) -> int:
        """The integer `name`; without a `default`, its absence is an error."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._unexpected(name, value, "an integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        """The number `name`; without a `default`, its absence is an error."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unexpected(name, value, "a number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self._unexpected(name, value, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """The string `name`; without a `default`, its absence is an error."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise self._unexpected(name, value, "a string")
        return value

    def object(self, name: str) -> JsonObject:
        """The object `name`, an empty one where it is absent."""
        value = self.fields.get(name, {})
        if not isinstance(value, dict):
            raise self._unexpected(name, value, "an object")
        return JsonObject(value, f"{self.source}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; none where it is absent."""
        value = self.fields.get(name, [])
        items = value if isinstance(value, list) else [value]
        integers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(integers) != len(items):
            raise self._unexpected(name, value, "an integer or a list of integers")
        return tuple(integers)

    def _unexpected(self, name: str, value: JsonValue, wanted: str) -> CheckpointError:
        if value is None:
            return CheckpointError(f"{self.source} has no field {name!r}, which must be {wanted}")
        return CheckpointError(f"{self.source}: {name!r} is {json.dumps(value)[:60]}, it must be {wanted}")
