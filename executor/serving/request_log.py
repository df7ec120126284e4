"""A log line for each request, and log lines as JSON. Prompts and answers are not logged."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from executor.api.errors import RequestError
from executor.serving.request_record import RequestRecord

_logger = logging.getLogger("executor.requests")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class RequestLog:
    """Writes one line when a request has ended or was refused."""

    def on_refused(self, request_id: str | None, error: RequestError) -> None:
        _logger.info(
            "request %s refused: %s",
            request_id,
            error.code,
            extra={"fields": {"request_id": request_id, "outcome": str(error.code), "field": error.field}},
        )

    def on_ended(self, record: RequestRecord) -> None:
        seconds = record.ended_at - record.accepted_at
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "outcome": record.outcome,
            "tenant": record.tenant,
            "trace_parent": record.trace_parent,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "reused_tokens": record.reused_tokens,
            "outputs": record.num_outputs,
            "seconds": round(seconds, 6),
            "seconds_to_first_token": _rounded(record.seconds_to_first_token),
            "seconds_per_output_token": _rounded(record.seconds_per_output_token),
        }
        _logger.info(
            "request %s ended: %s, %d prompt tokens, %d generated, %.3f s",
            record.request_id,
            record.outcome,
            record.prompt_tokens,
            record.completion_tokens,
            seconds,
            extra={"fields": fields},
        )


class LineFormatter(logging.Formatter):
    """One line a record, whatever clients put into ids and grammars; only a traceback has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's spelling
        record.message = _CONTROL.sub(lambda match: repr(match[0])[1:-1], record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of a request's line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(record.__dict__.get("fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
