"""Structural tags: free text in which certain beginnings oblige the model to go on in a certain way.

A tag is `begin`, a JSON value that follows a schema, `end`. It is recognised by a trigger, a beginning of `begin`:

```
text text <function=get_weather>{"city": "Rome"}</function> text
          ^ trigger "<function="  ^ schema       ^ end
```
The guide is upstream's JSON: `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": []}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.sampling.json_schema import parse_schema

_FIELD = "guided_decoding_params.guide"
_TEXT = r"TAG_TEXT: /(.|\n)*/"


def structural_tag_to_lark(guide: str, special_token: Callable[[str], int | None]) -> str:
    """The Lark grammar of a structural tag.

    Args:
        guide: upstream's JSON.
        special_token: gives the id of a special token by its spelling, and `None` for any other text. A trigger that
            is a special token is never met as text.

    Raises:
        InvalidRequestError: the guide is malformed.
        UnsupportedFeatureError: it is of another form, or a schema cannot be enforced.
    """
    structures, triggers = _parse(guide)
    rules = []
    for index, (begin, schema, end) in enumerate(structures):
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise _invalid(f"structures[{index}].begin is {begin!r}; it must start with one of the triggers {triggers}")
        rest = " ".join(part for part in (_quoted(begin[len(trigger) :]), f"%json {schema}", _quoted(end)) if part)
        token_id = special_token(trigger)
        if token_id is None:
            rules.append(f"trigger_{index}[lazy]: TAG_TEXT {_quoted(trigger)}\ntag_{index}: trigger_{index} {rest}")
        else:
            rules.append(f"tag_{index}: TAG_TEXT <[{token_id}]> {rest}")
    tags = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return "\n".join(["%llguidance {}", f"start: ({tags})* tag_end", "tag_end: TAG_TEXT", _TEXT, *rules])


def _parse(guide: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(begin, schema, end) of each structure, and the triggers."""
    try:
        tag = json.loads(guide)
    except ValueError as error:
        raise InvalidRequestError(f"{_FIELD} is not JSON: {error}", field=_FIELD) from error
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise _invalid('it must be {"type": "structural_tag", "structures": [...], "triggers": [...]}')
    unknown = sorted(tag.keys() - {"type", "structures", "triggers"})
    if unknown:
        raise UnsupportedFeatureError(f"{_FIELD}: structural tags with {unknown} are not offered", field=_FIELD)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise _invalid("triggers must be a list of texts that are not empty")
    if not isinstance(structures, list) or not structures:
        raise _invalid("structures must be a list that is not empty")
    return [_structure(index, structure) for index, structure in enumerate(structures)], triggers


def _structure(index: int, structure: Any) -> tuple[str, str, str]:
    match structure:
        case {"begin": str(begin), "schema": dict() | bool() | str() as schema, "end": str(end), **rest} if not rest:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return begin, json.dumps(parse_schema(text)), end
    raise _invalid(f'structures[{index}] must be {{"begin": text, "schema": JSON schema, "end": text}}')


def _quoted(text: str) -> str:
    """A Lark literal; nothing for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_FIELD}: {what}", field=_FIELD)
