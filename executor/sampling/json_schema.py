"""Which JSON schemas guided decoding can enforce.

JSON Schema lets a validator ignore a keyword that it does not know. A constraint that is ignored is worse than one
that is refused, so every keyword of a schema must be on one of the two lists here: enforced, or saying nothing about
the value. What is on neither list (`not`, `if`, `uniqueItems`, a misspelt `requried`, ...) is refused with its place.
"""

from __future__ import annotations

import json
from typing import Any

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.sampling.endless import check_schema_ends

_FIELD = "guided_decoding_params.guide"

# fmt: off
_ENFORCED = frozenset((
    "type", "enum", "const",
    "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum",
    "maxLength", "minLength", "pattern", "format",
    "items", "prefixItems", "additionalItems", "maxItems", "minItems",
    "properties", "patternProperties", "additionalProperties", "required", "maxProperties", "minProperties",
    "allOf", "anyOf", "oneOf", "$ref",
))
_SILENT = frozenset((
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions",
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
))
_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
))
# fmt: on

_ONE_SCHEMA = ("items", "additionalItems", "additionalProperties")
_LISTS_OF_SCHEMAS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def parse_schema(text: str) -> dict[str, Any]:
    """Read and check a schema.

    Raises:
        InvalidRequestError: it is not JSON, not a schema, `false`, which no value satisfies, or one whose values never
            end.
        UnsupportedFeatureError: it has a keyword or format that cannot be enforced.
    """
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{_FIELD} is not JSON: {error}", field=_FIELD) from error
    _check(schema, "#")
    if schema is False:
        raise InvalidRequestError(f"{_FIELD} is false, which no value satisfies", field=_FIELD)
    checked: dict[str, Any] = {} if schema is True else schema
    check_schema_ends(checked)
    return checked


def _check(schema: Any, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"{_FIELD}: the schema at {path} is {json.dumps(schema)[:40]}; it must be an object, true or false",
            field=_FIELD,
        )
    for keyword, value in schema.items():
        if keyword not in _ENFORCED and keyword not in _SILENT:
            raise UnsupportedFeatureError(
                f"{_FIELD}: keyword {keyword!r} at {path} cannot be enforced; those that can are "
                f"{', '.join(sorted(_ENFORCED))}",
                field=_FIELD,
            )
        if keyword == "format" and value not in _FORMATS:
            raise UnsupportedFeatureError(
                f"{_FIELD}: format {value!r} at {path} cannot be enforced; those that can are "
                f"{', '.join(sorted(_FORMATS))}",
                field=_FIELD,
            )
        where = f"{path}/{keyword}"
        if keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            for index, item in enumerate(value):
                _check(item, f"{where}/{index}")
        elif keyword in _ONE_SCHEMA:
            _check(value, where)
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, item in value.items():
                _check(item, f"{where}/{name}")
