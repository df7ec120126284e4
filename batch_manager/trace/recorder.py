"""Writes down what is asked of a BatchManager and what it decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from batch_manager.config import BatchManagerConfig
from batch_manager.errors import RefusalReason, RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import IterationPlan, Progress
from batch_manager.reasons import WaitCode
from batch_manager.request import FinishReason, Request
from batch_manager.trace.clock import InstantClock
from batch_manager.trace.errors import TraceError, TraceWriteError
from batch_manager.trace.lines import LineCodec, header_to_line
from batch_manager.trace.observed import ObservedBatchManager, Observer
from batch_manager.trace.observed_kv import KvCall, ObservedKvCacheManager
from batch_manager.trace.reader import open_trace
from batch_manager.trace.records import (
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
)
from batch_manager.trace.redaction import Redactor

_logger = logging.getLogger(__name__)


class TraceWriter(Observer):
    """Writes a trace while it watches.

    A full disk does not stop the run: writing stops, `error` says why, and `close` raises.
    """

    def __init__(self, path: str | Path, *, redact: bool = False) -> None:
        """`redact`: token ids, salts and multimodal digests are replaced, see `redaction`.

        Raises `OSError` when the file cannot be opened.
        """
        self._path = Path(path)
        self._file: TextIO = open_trace(self._path, "w")
        self.error: OSError | None = None
        self.num_lines = 0
        self._codec = LineCodec()
        self._redactor = Redactor() if redact else None
        self._kv: KvCacheManager | None = None
        self._may_have_drafts: dict[int, Request] = {}
        """Requests to which drafts can have been given since the last plan."""
        self._drafts: dict[int, int] = {}

    def close(self) -> None:
        """End the trace.

        Raises:
            TraceWriteError: some of it could not be written.
        """
        if not self._file.closed:
            self._write_line(self._codec.encode(End(self.num_lines)))
            try:
                self._file.close()
            except OSError as error:
                self._fail(error)
        if self.error is not None:
            raise TraceWriteError(f"{self._path} ends after {self.num_lines} lines: {self.error}") from self.error

    def _write(self, record: Record) -> None:
        self._write_line(self._codec.encode(record))

    def _write_line(self, line: str) -> None:
        if self.error is None:
            try:
                self._file.write(line)
                self.num_lines += 1
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = error
        _logger.error("the trace %s ends after %d lines: %s", self._path, self.num_lines, error)

    # What is watched

    def on_attach(self, manager: BatchManager, kv: KvCacheManager | None) -> None:
        self._kv = kv
        is_redacted = self._redactor is not None
        self._write_line(header_to_line(Header(manager.config, None if kv is None else kv.config, is_redacted)))

    def on_arrival(self, request: Request, held_for: WaitCode | None, now: float) -> None:
        self._may_have_drafts[request.request_id] = request
        written = request if self._redactor is None else self._redactor.redact_live(request)
        self._write(Arrival(now, written, held_for, None))

    def on_refusal(self, request: Request, held_for: WaitCode | None, refusal: RequestRefused, now: float) -> None:
        if refusal.reason is RefusalReason.INVALID_FIELD:
            return  # the request's own fault, whatever else is going on
        written = request if self._redactor is None else self._redactor.redact_request(request)
        self._write(Arrival(now, written, held_for, refusal.reason))

    def on_release(self, request_id: int, now: float) -> None:
        self._write(HoldRelease(now, request_id))

    def on_restart(self, request_ids: list[int], now: float) -> None:
        self._write(Restart(now, request_ids))

    def on_cancel(self, request_id: int, reason: FinishReason, was_live: bool, now: float) -> None:
        self._write(Cancellation(now, request_id, reason, was_live))
        self._forget(request_id)

    def before_schedule(self, now: float) -> None:  # noqa: ARG002
        self._drafts = {
            request_id: len(request.draft_token_ids)
            for request_id, request in self._may_have_drafts.items()
            if request.draft_token_ids
        }

    def on_schedule(self, plan: IterationPlan, now: float) -> None:
        num_free_blocks = 0 if self._kv is None else self._kv.num_free_blocks
        self._write(Planning.of(plan, now, self._drafts, num_free_blocks))
        self._may_have_drafts.clear()
        for request in plan.timed_out:
            self._forget(request.request_id)

    def on_update(
        self, plan: IterationPlan, sampled: Sequence[Sequence[int]], progress: list[Progress], now: float
    ) -> None:
        ended: dict[int, FinishReason] = {}
        for made in progress:
            if made.finish_reason is FinishReason.NOT_FINISHED:
                self._may_have_drafts[made.request.request_id] = made.request
            else:
                ended[made.request.request_id] = made.finish_reason
        if self._redactor is None:
            tokens = [list(row) for row in sampled]
        else:
            tokens = self._redactor.redact_sampled(plan, sampled, progress)
        self._write(Result(now, plan.iteration, tokens, ended))
        for request_id in ended:
            self._forget(request_id)

    def on_abandon(self, plan: IterationPlan, ended: list[Request], now: float) -> None:
        self._write(Failure(now, plan.iteration))
        for request in ended:
            self._forget(request.request_id)

    def _forget(self, request_id: int) -> None:
        """The request has ended."""
        self._may_have_drafts.pop(request_id, None)
        if self._redactor is not None:
            self._redactor.forget(request_id)

    def on_pause(self, now: float) -> None:
        self._write(Change(now, "pause", None))

    def on_drain(self, now: float) -> None:
        self._write(Change(now, "drain", None))

    def on_resume(self, now: float) -> None:
        self._write(Change(now, "resume", None))

    def on_change_config(self, config: BatchManagerConfig, now: float) -> None:
        self._write(Change(now, "config", config))

    def on_kv_call(self, call: KvCall) -> None:
        if call.request is not None and self._redactor is not None:
            call = call._replace(request=self._redactor.redact_request(call.request))
        self._write(call)


class TraceRecorder(ObservedBatchManager):
    """A BatchManager that records itself; goes where a BatchManager goes. `close` it, or use it as a context manager.

    ```
    clock = InstantClock()
    kv = ObservedKvCacheManager(kv_config, clock)
    with TraceRecorder(config, kv, clock, "run.jsonl") as manager:
        ...
    ```
    A plain KvCacheManager will do where nobody but the BatchManager calls it: no lower tiers, leases or pins.

    Drafts are recorded when they are assigned to `Request.draft_token_ids` between the `update` that gave the request
    tokens (or its arrival) and the next `schedule`.
    """

    def __init__(
        self,
        config: BatchManagerConfig,
        kv: KvCacheManager | None,
        clock: InstantClock,
        path: str | Path,
        observers: Sequence[Observer] = (),
        *,
        redact: bool = False,
    ) -> None:
        """`path` and `redact` are those of the `TraceWriter`.

        Raises:
            OSError: `path` cannot be opened.
            TraceError: `kv` has lower tiers and is not observed.
        """
        if kv is not None and kv.cache.transfers is not None and not isinstance(kv, ObservedKvCacheManager):
            raise TraceError(
                "the KV cache has lower tiers, whose transfers decide what can run; to be recorded it has to be an "
                "ObservedKvCacheManager"
            )
        self._writer = TraceWriter(path, redact=redact)
        super().__init__(config, kv, clock, [self._writer, *observers])

    def close(self) -> None:
        """End the trace. Raises `TraceWriteError` when some of it could not be written."""
        self._writer.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
