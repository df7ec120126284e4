"""Asks the same of a new BatchManager, by the recorded clock, and compares what it decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RefusalReason, RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.plan import IterationPlan
from batch_manager.request import FinishReason, Request
from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.errors import TraceFormatError
from batch_manager.trace.observed import ObservedBatchManager, Observer
from batch_manager.trace.observed_kv import KvCall, repeat
from batch_manager.trace.reader import TraceReader
from batch_manager.trace.records import (
    Arrival,
    Cancellation,
    Change,
    Failure,
    Header,
    HoldRelease,
    Planning,
    Record,
    Restart,
    Result,
    Row,
)
from batch_manager.trace.redaction import let_end


class Difference(NamedTuple):
    """Where a replay first decided otherwise."""

    line: int
    """Of the trace."""
    iteration: int
    """The one being planned, or the next one for what happens between plans."""
    request_id: int | None
    """None: it concerns the whole iteration."""
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        who = "" if self.request_id is None else f", request {self.request_id}"
        return (
            f"line {self.line}, iteration {self.iteration}{who}: {self.what} was {self.recorded!r} when recorded, "
            f"{self.replayed!r} when replayed"
        )


class ReplayResult(NamedTuple):
    num_iterations: int
    """Planned and compared, empty ones included."""
    num_requests: int
    """Arrived, refused ones included."""
    difference: Difference | None
    """The first one; the replay stops there."""
    is_complete: bool
    """Whether the trace has its end; without, the run was killed and what it had written is all there is."""


class _Differs(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class Replay:
    """A BatchManager driven by the records of a trace."""

    def __init__(self, header: Header, observers: Sequence[Observer] = ()) -> None:
        self._clock = ManualClock()
        clock = InstantClock(self._clock)
        self.kv = None if header.kv_config is None else KvCacheManager(header.kv_config, clock)
        self.manager = ObservedBatchManager(header.config, self.kv, clock, observers)
        self.num_iterations = 0
        self.num_requests = 0
        self._is_redacted = header.is_redacted
        self._iteration = 0
        self._line = 0
        self._in_flight: dict[int, IterationPlan] = {}
        self._live: dict[int, Request] = {}

    def apply(self, record: Record, line: int) -> Difference | None:
        """Ask what was asked; the difference between then and now, if there is one.

        Raises:
            TraceFormatError: the records do not follow from each other.
        """
        self._line = line
        try:
            self._apply(record)
        except _Differs as differs:
            return differs.difference
        return None

    def _apply(self, record: Record) -> None:
        match record:
            case Arrival():
                self._at(record.now)
                self._add(record)
            case HoldRelease(now, request_id):
                self._at(now)
                self.manager.release_hold(request_id)
            case Restart(now, request_ids):
                self._at(now)
                self.manager.restart([self._live[request_id] for request_id in request_ids])
            case Cancellation(now, request_id, reason, was_live):
                self._at(now)
                is_live = self.manager.cancel_request(request_id, reason)
                self._compare("whether the request was live", was_live, is_live, request_id)
                self._live.pop(request_id, None)
            case Planning():
                self._at(record.now)
                self._schedule(record)
            case Result():
                self._at(record.now)
                self._update(record)
            case Failure(now, iteration):
                self._at(now)
                for request in self.manager.abandon(self._plan_in_flight(iteration)):
                    del self._live[request.request_id]
            case KvCall():
                self._at(record.now)
                self._call_kv(record)
            case Change():
                self._at(record.now)
                self._change(record.kind, record.config)

    def _at(self, now: float) -> None:
        self._clock.now = now

    def _compare(self, what: str, recorded: object, replayed: object, request_id: int | None = None) -> None:
        if recorded != replayed:
            raise _Differs(Difference(self._line, self._iteration, request_id, what, recorded, replayed))

    def _add(self, record: Arrival) -> None:
        self.num_requests += 1
        request = record.request
        refused: RefusalReason | None = None
        try:
            self.manager.add_request(request, record.held_for)
        except RequestRefused as refusal:
            refused = refusal.reason
        else:
            self._live[request.request_id] = request
        self._compare("refusal", record.refused, refused, request.request_id)

    def _schedule(self, record: Planning) -> None:
        self.num_iterations += 1
        self._iteration = record.iteration
        for request_id, count in record.drafts.items():
            request = self._live.get(request_id)
            if request is None:
                raise TraceFormatError(self._line, f"drafts for request {request_id}, which is not live")
            request.draft_token_ids = [0] * count
        plan = self.manager.schedule()
        replayed = Planning.of(plan, record.now, record.drafts, self.kv.num_free_blocks if self.kv else 0)
        for request_id in replayed.timed_out:
            del self._live[request_id]
        self._compare("the iteration's number", record.iteration, replayed.iteration)
        self._compare("timed out requests", record.timed_out, replayed.timed_out)
        self._compare("paused requests", record.paused, replayed.paused)
        for before, after in zip_longest(record.rows, replayed.rows):
            self._compare_rows(before, after)
        self._compare("rows in all", record.num_tokens, replayed.num_tokens)
        self._compare("block copies", record.copies, replayed.copies)
        self._compare("free blocks", record.num_free_blocks, replayed.num_free_blocks)
        self._compare("the block tables' checksum", record.table_checksum, replayed.table_checksum)
        if not plan.is_empty:
            self._in_flight[plan.iteration] = plan

    def _compare_rows(self, recorded: Row | None, replayed: Row | None) -> None:
        if recorded is None or replayed is None or recorded.request_id != replayed.request_id:
            who = recorded or replayed
            assert who is not None
            self._compare("the scheduled request", _id_of(recorded), _id_of(replayed), who.request_id)
            return
        for name, before, after in zip(Row._fields, recorded, replayed, strict=True):
            self._compare(name, before, after, recorded.request_id)

    def _update(self, record: Result) -> None:
        plan = self._plan_in_flight(record.iteration)
        if self._is_redacted:
            for entry, codes in zip(plan.scheduled, record.tokens, strict=True):
                request = entry.request
                if request.request_id in record.ended and not request.is_finished:
                    let_end(request, codes, record.ended[request.request_id])
        progress = self.manager.update(plan, record.tokens)
        ended = {
            made.request.request_id: made.finish_reason
            for made in progress
            if made.finish_reason is not FinishReason.NOT_FINISHED
        }
        for request_id in ended:
            del self._live[request_id]
        self._compare("ended requests", record.ended, ended)

    def _plan_in_flight(self, iteration: int) -> IterationPlan:
        plan = self._in_flight.pop(iteration, None)
        if plan is None:
            raise TraceFormatError(self._line, f"iteration {iteration} is not in flight")
        return plan

    def _call_kv(self, call: KvCall) -> None:
        if self.kv is None:
            raise TraceFormatError(self._line, f"{call.name} asks a KV cache that the trace does not have")
        try:
            result = repeat(call, self.kv, self._live)
        except (KeyError, ValueError) as error:
            raise TraceFormatError(self._line, f"the call of the KV cache cannot be repeated: {error}") from error
        self._compare(f"the result of {call.name}", call.result or [], result or [])

    def _change(self, kind: str, config: BatchManagerConfig | None) -> None:
        match kind:
            case "pause":
                self.manager.pause()
            case "drain":
                self.manager.drain()
            case "resume":
                self.manager.resume()
            case "config":
                assert config is not None
                self.manager.change_config(config)


def _id_of(row: Row | None) -> int | None:
    return None if row is None else row.request_id


def replay(path: str | Path, observers: Sequence[Observer] = ()) -> ReplayResult:
    """Replay a trace and compare, up to the first difference.

    Args:
        path: what a `TraceRecorder` wrote.
        observers: watch the replay as they would have watched the run, by the recorded clock.

    Raises:
        TraceFormatError, TraceVersionError: the trace cannot be read.
        OSError: the file cannot be read.
    """
    with TraceReader(path) as reader:
        replayed = Replay(reader.header, observers)
        difference = next(_differences(replayed, reader), None)
        return ReplayResult(replayed.num_iterations, replayed.num_requests, difference, reader.is_complete)


def _differences(replayed: Replay, reader: TraceReader) -> Iterator[Difference]:
    for record in reader:
        difference = replayed.apply(record, reader.line)
        if difference is not None:
            yield difference
