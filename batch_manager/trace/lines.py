"""Records as lines of JSON, and back. What is empty or usual is left out of a line."""

from __future__ import annotations

import json
from typing import Any

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RefusalReason
from batch_manager.kv import KvCacheConfig
from batch_manager.plan import BlockCopy
from batch_manager.reasons import WaitCode
from batch_manager.request import FinishReason
from batch_manager.trace.encoding import (
    Json,
    config_from_json,
    config_to_json,
    enum_from_json,
    request_from_json,
    request_to_json,
)
from batch_manager.trace.errors import TraceFormatError, TraceVersionError
from batch_manager.trace.observed_kv import KvCall
from batch_manager.trace.records import (
    CHANGE_KINDS,
    FORMAT_NAME,
    FORMAT_VERSION,
    Arrival,
    Cancellation,
    Change,
    End,
    Failure,
    Header,
    HoldRelease,
    Planning,
    Record,
    Restart,
    Result,
    RowCodec,
    TimedRecord,
)


def header_to_line(header: Header) -> str:
    return _dump(
        {
            "trace": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "redacted": header.is_redacted,
            "batch_manager": config_to_json(header.config),
            "kv": None if header.kv_config is None else config_to_json(header.kv_config),
        }
    )


def header_from_line(text: str) -> Header:
    """Raises `TraceFormatError` for anything but a header, `TraceVersionError` for one of another version."""
    data = _load(text, 1)
    if data.get("trace") != FORMAT_NAME:
        raise TraceFormatError(1, f'this is no trace: the first line must have "trace": "{FORMAT_NAME}"')
    if data.get("version") != FORMAT_VERSION:
        raise TraceVersionError(
            f"the trace has format version {data.get('version')!r}; this code reads version {FORMAT_VERSION}"
        )
    try:
        kv = data["kv"]
        return Header(
            config_from_json(BatchManagerConfig, data["batch_manager"], 1),
            None if kv is None else config_from_json(KvCacheConfig, kv, 1),
            data["redacted"],
        )
    except (KeyError, AttributeError) as error:
        raise TraceFormatError(1, f"the header is incomplete: {error}") from error


class LineCodec:
    """Turns the records of one trace, in order, into lines or back."""

    def __init__(self) -> None:
        self._rows = RowCodec()

    # Writing

    def encode(self, record: Record) -> str:
        if isinstance(record, End):
            return _dump({"end": record.num_lines})
        return _dump({"t": record.now, **self._fields(record)})

    def _fields(self, record: TimedRecord) -> Json:
        match record:
            case Arrival():
                data: Json = {"add": request_to_json(record.request)}
                if record.held_for is not None:
                    data["held_for"] = record.held_for.name
                if record.refused is not None:
                    data["refused"] = record.refused.name
                return data
            case HoldRelease():
                return {"release": record.request_id}
            case Restart():
                return {"restart": record.request_ids}
            case Cancellation():
                return {"cancel": record.request_id, "reason": record.reason.name, "live": record.was_live}
            case Planning():
                return self._planning(record)
            case Result():
                tokens = [sampled[0] if len(sampled) == 1 else sampled for sampled in record.tokens]
                data = {"update": record.iteration, "tokens": tokens}
                if record.ended:
                    data["ended"] = [[request_id, reason.name] for request_id, reason in record.ended.items()]
                return data
            case Failure():
                return {"abandon": record.iteration}
            case KvCall():
                data = {"kv": record.name}
                for name, value in (("args", record.arguments), ("result", record.result)):
                    if value not in (None, []):
                        data[name] = value
                if record.request is not None:
                    data["request"] = request_to_json(record.request)
                return data
            case Change():
                data = {"change": record.kind}
                if record.config is not None:
                    data["config"] = config_to_json(record.config)
                return data

    def _planning(self, record: Planning) -> Json:
        data: Json = {"schedule": record.iteration}
        for name, value in (
            ("rows", self._rows.encode(record.rows)),
            ("num_tokens", record.num_tokens),
            ("copies", [list(copy) for copy in record.copies]),
            ("paused", record.paused),
            ("timed_out", record.timed_out),
            ("drafts", [list(pair) for pair in record.drafts.items()]),
            ("free", record.num_free_blocks),
            ("tables", record.table_checksum),
        ):
            if value:
                data[name] = value
        return data

    # Reading

    def decode(self, text: str, line: int) -> Record:
        """Raises `TraceFormatError` for anything that `encode` does not write."""
        data = _load(text, line)
        try:
            return self._record(data, line)
        except TraceFormatError:
            raise
        except KeyError as missing:
            raise TraceFormatError(line, f"{missing} is missing or unknown") from missing
        except (TypeError, ValueError) as error:
            raise TraceFormatError(line, f"a value has the wrong type or size: {error}") from error

    def _record(self, data: Json, line: int) -> Record:
        match data:
            case {"end": num_lines}:
                return End(num_lines)
            case {"t": now, "add": request}:
                held_for, refused = data.get("held_for"), data.get("refused")
                return Arrival(
                    now,
                    request_from_json(request, line),
                    None if held_for is None else enum_from_json(WaitCode, held_for, line),
                    None if refused is None else enum_from_json(RefusalReason, refused, line),
                )
            case {"t": now, "release": request_id}:
                return HoldRelease(now, request_id)
            case {"t": now, "restart": request_ids}:
                return Restart(now, request_ids)
            case {"t": now, "cancel": request_id, "reason": reason, "live": was_live}:
                return Cancellation(now, request_id, enum_from_json(FinishReason, reason, line), was_live)
            case {"t": now, "schedule": iteration}:
                return Planning(
                    now,
                    iteration,
                    self._rows.decode(data.get("rows", [])),
                    data.get("num_tokens", 0),
                    [BlockCopy(*copy) for copy in data.get("copies", [])],
                    data.get("paused", []),
                    data.get("timed_out", []),
                    dict(data.get("drafts", [])),
                    data.get("free", 0),
                    data.get("tables", 0),
                )
            case {"t": now, "update": iteration, "tokens": tokens}:
                ended = {
                    request_id: enum_from_json(FinishReason, reason, line)
                    for request_id, reason in data.get("ended", [])
                }
                sampled = [[item] if isinstance(item, int) else [int(token) for token in item] for item in tokens]
                return Result(now, iteration, sampled, ended)
            case {"t": now, "abandon": iteration}:
                return Failure(now, iteration)
            case {"t": now, "kv": name}:
                request = data.get("request")
                return KvCall(
                    now,
                    name,
                    data.get("args", []),
                    None if request is None else request_from_json(request, line),
                    data.get("result"),
                )
            case {"t": now, "change": kind} if kind in CHANGE_KINDS:
                config = data["config"] if kind == "config" else None
                return Change(now, kind, config and config_from_json(BatchManagerConfig, config, line))
        raise TraceFormatError(
            line,
            f"unknown kind of record with the fields {', '.join(sorted(data))}; expected t and one of add, release, "
            "restart, cancel, schedule, update, abandon, kv, change, or end",
        )


def _dump(data: Json) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


def _load(text: str, line: int) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TraceFormatError(line, f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TraceFormatError(line, f"a JSON object is expected, not {type(data).__name__}")
    return data
