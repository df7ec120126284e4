"""The lines of a trace, one type a kind.

```
 header   {"trace": "batch-manager", "version": 1, "batch_manager": {...}, "kv": {...}}
 arrival  {"t": 0.1, "add": {...}}                     + "held_for", "refused"
 hold     {"t": 0.1, "release": 7}
 restart  {"t": 0.1, "restart": [7, 9]}
 cancel   {"t": 0.1, "cancel": 7, "reason": "CANCELLED", "live": true}
 plan     {"t": 0.1, "schedule": 12, "rows": [...]}    + "num_tokens", "copies", "paused", "timed_out", "drafts", ...
 result   {"t": 0.1, "update": 12, "tokens": [...]}    + "ended"
 failure  {"t": 0.1, "abandon": 12}
 cache    {"t": 0.1, "kv": "lease", "args": [7, "peer"], "result": 3}   + "request"
 change   {"t": 0.1, "change": "pause" | "drain" | "resume" | "config"}   + "config"
 end      {"end": 35}
```
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RefusalReason
from batch_manager.kv import KvCacheConfig
from batch_manager.plan import BlockCopy, IterationPlan, Phase, ScheduledRequest
from batch_manager.reasons import WaitCode
from batch_manager.request import FinishReason, Request
from batch_manager.trace.observed_kv import KvCall

GENERATION = Phase.GENERATION
new_tuple = tuple.__new__

FORMAT_NAME = "batch-manager"
FORMAT_VERSION = 1


class Header(NamedTuple):
    config: BatchManagerConfig
    kv_config: KvCacheConfig | None
    is_redacted: bool


class Arrival(NamedTuple):
    now: float
    request: Request
    """As it arrived."""
    held_for: WaitCode | None
    refused: RefusalReason | None
    """It was not taken in."""


class HoldRelease(NamedTuple):
    now: float
    request_id: int


class Restart(NamedTuple):
    now: float
    request_ids: list[int]


class Cancellation(NamedTuple):
    now: float
    request_id: int
    reason: FinishReason
    was_live: bool


class Row(NamedTuple):
    """One request's part of a plan: `ScheduledRequest` without the request itself."""

    request_id: int
    start: int
    num_scheduled_tokens: int
    num_replayed_tokens: int
    num_draft_tokens: int
    num_tokens_with_spec: int
    num_reused_tokens: int
    samples: bool
    phase: Phase

    @staticmethod
    def of(entry: ScheduledRequest) -> Row:
        return new_tuple(Row, (entry[0].request_id, *entry[1:]))


class Planning(NamedTuple):
    """A plan, and what was observable of it."""

    now: float
    iteration: int
    rows: list[Row]
    num_tokens: int
    copies: list[BlockCopy]
    paused: list[int]
    timed_out: list[int]
    drafts: dict[int, int]
    """How many tokens were proposed, by request, since the last plan."""
    num_free_blocks: int
    """After planning; 0 without a KV cache."""
    table_checksum: int
    """See `table_checksum`; 0 for an empty plan."""

    @staticmethod
    def of(plan: IterationPlan, now: float, drafts: dict[int, int], num_free_blocks: int) -> Planning:
        return Planning(
            now,
            plan.iteration,
            [Row.of(entry) for entry in plan.scheduled],
            plan.num_tokens,
            plan.copies,
            [request.request_id for request in plan.paused],
            [request.request_id for request in plan.timed_out],
            drafts,
            num_free_blocks,
            table_checksum(plan),
        )


class Result(NamedTuple):
    now: float
    iteration: int
    tokens: list[list[int]]
    """Sampled, for each row of the plan."""
    ended: dict[int, FinishReason]
    """By request."""


class Failure(NamedTuple):
    now: float
    iteration: int


class Change(NamedTuple):
    now: float
    kind: str
    """`pause`, `drain`, `resume`, `config`."""
    config: BatchManagerConfig | None
    """All of it; only with `config`."""


class End(NamedTuple):
    num_lines: int
    """Lines before this one, header included."""


TimedRecord = Arrival | HoldRelease | Restart | Cancellation | Planning | Result | Failure | KvCall | Change
Record = TimedRecord | End

CHANGE_KINDS = ("pause", "drain", "resume", "config")


def table_checksum(plan: IterationPlan) -> int:
    """CRC-32 that tells when a scheduled request's block table has another length or another last block."""
    tables = [entry.request.block_ids for entry in plan.scheduled]
    numbers = [len(table) for table in tables]
    numbers += [table[-1] for table in tables if table]
    return crc32(struct.pack(f"<{len(numbers)}q", *numbers))


class RowCodec:
    """Writes a row that goes on as expected as its request id alone.

    Expected is one more token in the generation phase, behind a row of the plan before. Nothing else is remembered, so
    reader and writer always expect the same.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Row] = {}
        """Rows of the plan before, by request."""

    def encode(self, rows: list[Row]) -> list[int | list[int | str]]:
        previous = self._previous
        packed: list[int | list[int | str]] = []
        for row in rows:
            before = previous.get(row[0])
            if before is not None and row == _next_row(before):
                packed.append(row[0])
            else:
                packed.append([*row[:7], int(row.samples), row.phase.value[0]])
        self._remember(rows)
        return packed

    def decode(self, packed: list[int | list[int | str]]) -> list[Row]:
        """Raises `ValueError`, `TypeError` or `KeyError` for anything that `encode` does not write."""
        rows = []
        for item in packed:
            if isinstance(item, int):
                rows.append(Row(*_next_row(self._previous[item])))
            else:
                *numbers, samples, phase = item
                request_id, start, scheduled, replayed, drafts, with_spec, reused = map(int, numbers)
                rows.append(
                    Row(
                        request_id, start, scheduled, replayed, drafts, with_spec, reused, bool(samples), _PHASES[phase]
                    )
                )
        self._remember(rows)
        return rows

    def _remember(self, rows: list[Row]) -> None:
        if rows:
            self._previous = {row[0]: row for row in rows}


_PHASES: dict[object, Phase] = {phase.value[0]: phase for phase in Phase}


def _next_row(row: Row) -> tuple[int, int, int, int, int, int, int, bool, Phase]:
    """The fields of the row that is expected after `row`."""
    request_id, start, size, replayed, _, _, reused, _, phase = row
    start += size
    if phase is not GENERATION:
        replayed = 0
    return (request_id, start, 1, replayed, 0, start + 1, reused, True, GENERATION)
