"""Configurations and requests as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from batch_manager.config import BatchManagerConfig
from batch_manager.kv import KvCacheConfig, KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.request import MultimodalSpan, Request
from batch_manager.trace.errors import TraceFormatError

Json = dict[str, Any]
Config = TypeVar("Config", BatchManagerConfig, KvCacheConfig)
AnyEnum = TypeVar("AnyEnum", bound=Enum)


def config_to_json(config: BatchManagerConfig | KvCacheConfig) -> Json:
    """Every field; enums by name."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    return dict(value) if isinstance(value, Mapping) else value


def config_from_json(kind: type[Config], data: Json, line: int) -> Config:
    """The inverse. A field that was not known when the trace was recorded has its default.

    Raises:
        TraceFormatError: a field is unknown, or its value is refused.
    """
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in types:
            raise TraceFormatError(line, f"{kind.__name__} has no field {name!r}; known are {', '.join(sorted(types))}")
        is_enum = isinstance(types[name], type) and issubclass(types[name], Enum)
        values[name] = enum_from_json(types[name], value, line) if is_enum else value
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise TraceFormatError(line, f"{kind.__name__}: {error}") from error


def enum_from_json(kind: type[AnyEnum], name: object, line: int) -> AnyEnum:
    if not isinstance(name, str) or name not in kind.__members__:
        raise TraceFormatError(line, f"{name!r} is no {kind.__name__}; expected one of {', '.join(kind.__members__)}")
    return kind[name]


_PLAIN_FIELDS: dict[str, object] = {
    "end_id": None,
    "min_new_tokens": 0,
    "priority": 0.5,
    "tenant": "",
    "allotted_time": None,
    "cache_salt": None,
    "num_remote_tokens": 0,
    "adapter_id": None,
    "adapter_pages": 0,
    "beam_width": 1,
}
"""Fields of a request that are written as they are, unless they have these values."""


def request_to_json(request: Request) -> Json:
    """A request as it arrives: what is at its default is left out."""
    data: Json = {
        "id": request.request_id,
        "prompt": request.token_ids[: request.num_prompt_tokens],
        "max_new_tokens": request.max_new_tokens,
        "arrival_time": request.arrival_time,
    }
    for name, default in _PLAIN_FIELDS.items():
        value = getattr(request, name)
        if value != default:
            data[name] = value
    if len(request.token_ids) > request.num_prompt_tokens:
        data["generated_token_ids"] = request.token_ids[request.num_prompt_tokens :]
    if request.stop_token_ids:
        data["stop_token_ids"] = sorted(request.stop_token_ids)
    if request.stop_words:
        data["stop_words"] = [list(word) for word in request.stop_words]
    if request.multimodal_spans:
        data["multimodal_spans"] = [
            [span.start, span.length, span.content_hash.hex()] for span in request.multimodal_spans
        ]
    if request.retention is not None:
        data["retention"] = _retention_to_json(request.request_id, request.retention)
    return data


def request_from_json(data: Json, line: int) -> Request:
    """The inverse.

    Raises:
        TraceFormatError: a field is missing, unknown, or of another type.
    """
    values = dict(data)
    try:
        if "multimodal_spans" in values:
            values["multimodal_spans"] = [
                MultimodalSpan(start, length, bytes.fromhex(digest))
                for start, length, digest in values["multimodal_spans"]
            ]
        if "retention" in values:
            values["retention"] = _retention_from_json(values["retention"])
        return Request(values.pop("id"), values.pop("prompt"), values.pop("max_new_tokens"), **values)
    except KeyError as missing:
        raise TraceFormatError(line, f"the request has no field {missing}") from missing
    except (TypeError, ValueError) as error:
        raise TraceFormatError(line, f"the request cannot be read: {error}") from error


def _retention_to_json(request_id: int, retention: object) -> Json:
    if not isinstance(retention, KvCacheRetentionConfig):
        raise TraceFormatError(
            0, f"request {request_id}: retention is {retention!r}; only a KvCacheRetentionConfig can be recorded"
        )
    return {
        "ranges": [
            [part.token_start, part.token_end, part.priority, _milliseconds(part.duration_ms)]
            for part in retention.token_range_retention_configs
        ],
        "decode_priority": retention.decode_retention_priority,
        "decode_duration_ms": _milliseconds(retention.decode_duration_ms),
    }


def _retention_from_json(data: Json) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig(
        [TokenRangeRetentionConfig(*part) for part in data["ranges"]],
        data["decode_priority"],
        data["decode_duration_ms"],
    )


def _milliseconds(duration: timedelta | float | int | None) -> float | None:
    return duration.total_seconds() * 1000.0 if isinstance(duration, timedelta) else duration
