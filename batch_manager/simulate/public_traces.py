"""Workloads from published traces and from our own: Mooncake, Azure, BurstGPT, recorded runs.

Lengths may be scaled by `length_scale` (rounded up), which scales what has to be simulated with it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from batch_manager.request import FinishReason, Request
from batch_manager.simulate.errors import WorkloadFormatError
from batch_manager.simulate.workload import FILLER_TOKEN, FIRST_CONTENT_TOKEN, OfferedRequest, content
from batch_manager.stop import append_until_stop
from batch_manager.trace.reader import TraceReader
from batch_manager.trace.records import Arrival, Cancellation, Failure, Planning, Result
from batch_manager.trace.redaction import let_end

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""


def mooncake(path: str | Path, *, length_scale: float = 1.0) -> Iterator[OfferedRequest]:
    """Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one a block of 512 tokens).

    Prompts with the same leading hash ids share these tokens, so that they are found in the cache as in the original.
    What requests generate is not part of any later prompt, though in the original run some of it was.
    """
    block = max(1, round(MOONCAKE_BLOCK * length_scale))
    with Path(path).open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
                length = _scaled(row["input_length"], length_scale)
                yield OfferedRequest(
                    row["timestamp"] / 1000.0,
                    _prompt_of_blocks(row["hash_ids"], length, block),
                    _scaled(row["output_length"], length_scale),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise _not_a_row(path, line, "timestamp, input_length, output_length and hash_ids", error) from error


def _prompt_of_blocks(hash_ids: list[int], length: int, block: int) -> list[int]:
    if not (len(hash_ids) - 1) * block < length + block or not hash_ids:
        raise ValueError(f"{len(hash_ids)} hash_ids for {length} tokens")
    tokens = [FILLER_TOKEN] * length
    for index, hash_id in enumerate(hash_ids):
        if index * block < length:
            tokens[index * block] = FIRST_CONTENT_TOKEN + hash_id
    return tokens


def azure(path: str | Path, *, length_scale: float = 1.0) -> Iterator[OfferedRequest]:
    """Azure's CSV: `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`. Prompts share nothing."""
    first: datetime | None = None
    for line, row in _csv_rows(path):
        try:
            # Seven digits of a second are one too many for datetime.
            seconds, _, fraction = row["TIMESTAMP"].partition(".")
            moment = datetime.fromisoformat(seconds)
            first = first or moment
            now = (moment - first).total_seconds() + float(f"0.{fraction or 0}")
            yield _without_sharing(line, now, row["ContextTokens"], row["GeneratedTokens"], length_scale)
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_row(path, line, "TIMESTAMP, ContextTokens and GeneratedTokens", error) from error


def burst_gpt(path: str | Path, *, length_scale: float = 1.0) -> Iterator[OfferedRequest]:
    """BurstGPT's CSV: `Timestamp` (s), `Request tokens`, `Response tokens`. Prompts share nothing.

    Rows of failed requests (no response tokens) are left out, as they tell no length.
    """
    for line, row in _csv_rows(path):
        try:
            if int(row["Response tokens"]):
                yield _without_sharing(
                    line, float(row["Timestamp"]), row["Request tokens"], row["Response tokens"], length_scale
                )
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_row(path, line, "Timestamp, Request tokens and Response tokens", error) from error


def _csv_rows(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file), start=2)


def _without_sharing(
    number: int, now: float, num_prompt_tokens: str, num_output_tokens: str, length_scale: float
) -> OfferedRequest:
    return OfferedRequest(
        now,
        content(number, _scaled(int(num_prompt_tokens), length_scale)),
        _scaled(int(num_output_tokens), length_scale),
    )


def _scaled(length: int, scale: float) -> int:
    if length < 0:
        raise ValueError(f"a length of {length}")
    return max(1, math.ceil(length * scale))


def _not_a_row(path: str | Path, line: int, expected: str, error: Exception) -> WorkloadFormatError:
    return WorkloadFormatError(f"{path}, line {line}: expected {expected}; {type(error).__name__}: {error}")


class _Recorded:
    """A request of a recorded run while its trace is read."""

    def __init__(self, request: Request) -> None:
        self.request = request
        """Its tokens grow as they were generated."""
        self.is_live = True
        self.has_ended = False
        """By itself, or with a step that failed."""
        self.cancel_after: float | None = None

    def take(self, tokens: list[int], ended: dict[int, FinishReason], is_redacted: bool) -> None:
        """It was given `tokens`; `ended` are those that ended with the same step."""
        reason = ended.get(self.request.request_id)
        if reason is not None and is_redacted:
            let_end(self.request, tokens, reason)
        append_until_stop(self.request, tokens)
        if reason is not None:
            self.end()

    def end(self) -> None:
        self.is_live = False
        self.has_ended = True

    def offered(self) -> OfferedRequest:
        request = self.request
        return OfferedRequest(
            request.arrival_time,
            request.token_ids[: request.num_prompt_tokens],
            max(1, request.num_generated_tokens) if self.has_ended else request.max_new_tokens,
            request.max_new_tokens,
            request.token_ids[request.num_prompt_tokens :],
            request.priority,
            request.tenant,
            request.allotted_time,
            self.cancel_after,
            request.cache_salt,
            request.adapter_id,
            request.adapter_pages,
        )


def recorded(path: str | Path) -> list[OfferedRequest]:
    """The requests of a recorded run that were taken in, by arrival time.

    A request that ended by itself generates what it generated then. One that its caller cancelled is cancelled as long
    after its arrival again.

    Raises:
        TraceFormatError: the trace cannot be read.
    """
    live: dict[int, _Recorded] = {}
    offered: list[_Recorded] = []
    planned: dict[int, list[_Recorded]] = {}
    with TraceReader(path) as reader:
        for record in reader:
            match record:
                case Arrival(refused=None):
                    entry = live[record.request.request_id] = _Recorded(record.request)
                    offered.append(entry)
                case Cancellation(was_live=True):
                    cancelled = live[record.request_id]
                    cancelled.is_live = False
                    if record.reason is FinishReason.CANCELLED:
                        cancelled.cancel_after = max(0.0, record.now - cancelled.request.arrival_time)
                case Planning():
                    for request_id in record.timed_out:
                        live[request_id].is_live = False
                    planned[record.iteration] = [live[row.request_id] for row in record.rows]
                case Failure():
                    for entry in planned.pop(record.iteration):
                        if entry.is_live:
                            entry.end()
                case Result():
                    for entry, tokens in zip(planned.pop(record.iteration), record.tokens, strict=True):
                        if entry.is_live:
                            entry.take(tokens, record.ended, reader.header.is_redacted)
    return sorted((entry.offered() for entry in offered), key=lambda request: request.arrival_time)
