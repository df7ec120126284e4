"""The Executor's process: serves one engine to the model instances of a Triton server.

```
                 connection 1: reader ──┐                       ┌── listener 1 ── outbox ── writer
instances ══════ connection 2: reader ──┼─► Executor, its loop ─┼── listener 2 ── outbox ── writer
                 ...                    │                       └── once an iteration each
                 stats, to one of them ◄┘
```
It ends when its last connection does. Nothing waits for an instance: what one does not read stays in its outbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from executor.api.errors import RequestError
from executor.api.request import Request
from executor.api.response import Response
from executor.api.stats import IterationStats
from executor.engines.interface import EngineSpec
from executor.transfer.stats import TransferStats
from executor.triton.backend.runtime import is_running, remove_remains
from executor.triton.backend.wire import VERSION, FrameWriter, WireError, array, frame, receive
from executor.triton.outputs import event, idle, metric_values, transfer_counts
from executor.triton.requests import RowReader, RowRequest, with_tensor_name

_logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""


class BridgedExecutor(Protocol):
    """What is needed of an Executor."""

    @property
    def spec(self) -> EngineSpec: ...
    @property
    def num_unfinished_requests(self) -> int: ...
    def enqueue_request(self, request: Request, *, listener: Callable[[list[Response]], None]) -> int: ...
    def cancel_request(self, request_id: int, /) -> None: ...
    def get_latest_iteration_stats(self) -> Sequence[IterationStats]: ...
    def get_transfer_stats(self) -> TransferStats | None: ...


class Worker:
    """Serves an Executor on a listening socket."""

    def __init__(self, listener: socket.socket, server_process: int) -> None:
        """Take the connection of the instance that started the process, which connected before it did."""
        self._listener = listener
        self._server_process = server_process
        self._connections: list[Connection] = []
        self._changed = threading.Condition()
        self._executor: BridgedExecutor | None = None
        self._reader: RowReader | None = None
        self._failure: str | None = None
        self._stats: IterationStats | None = None
        """Of the last iteration, unless it was told that nothing has run since."""
        self._transfers: dict[str, float] = {}
        """Counts that were told."""
        self._add(listener.accept()[0])
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Tell all who wait that there is no Executor, and return when they know."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()
        self.wait_until_alone(_FAREWELL_SECONDS)

    def serve(self, executor: BridgedExecutor, reader: RowReader, stats_period_seconds: float) -> None:
        """Run until the last connection has ended, and cancel what is left."""
        with self._changed:
            self._executor, self._reader = executor, reader
            self._changed.notify_all()
        while self.wait_until_alone(stats_period_seconds):
            if not is_running(self._server_process):
                self._end_orphans()
                return
            self._send_stats(executor)

    def wait_until_alone(self, seconds: float) -> bool:
        """Wait so long for the last connection to end; whether there are some still."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, seconds)
            return bool(self._connections)

    def wait_for_executor(self) -> tuple[BridgedExecutor, RowReader] | str:
        """The Executor once it is ready, or the reason why there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._executor is not None or self._failure is not None)
            if self._executor is not None and self._reader is not None:
                return self._executor, self._reader
            return self._failure or ""

    def remove(self, connection: Connection) -> None:
        with self._changed:
            self._connections.remove(connection)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # the process is ending
            self._add(accepted)

    def _add(self, accepted: socket.socket) -> None:
        connection = Connection(self, accepted)
        with self._changed:
            self._connections.append(connection)
        connection.start()

    def _end_orphans(self) -> None:
        """End the instances of a server that has been killed.

        They end by themselves, unless they wait for the server's answer in a call that keeps Python's lock.
        """
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(ProcessLookupError):
                os.kill(connection.peer_process, signal.SIGKILL)
        remove_remains()

    def _send_stats(self, executor: BridgedExecutor) -> None:
        """To one instance: those of a model share what they show."""
        news: dict[str, Any] = {}
        latest = executor.get_latest_iteration_stats()
        if latest:
            self._stats = latest[-1]
            news["stats"] = metric_values(self._stats, time.time())
        elif self._stats is not None and not executor.num_unfinished_requests:
            news["stats"] = metric_values(idle(self._stats), time.time())
            self._stats = None
        transfers = executor.get_transfer_stats()
        if transfers is not None:
            counts = transfer_counts(transfers)
            increments = {name: count - self._transfers.get(name, 0) for name, count in counts.items()}
            if any(increments.values()):
                news["transfers"] = increments
            self._transfers = counts
        with self._changed:
            receiver = self._connections[0] if self._connections else None
        if news and receiver is not None:
            receiver.send(frame(news))


class Connection:
    """One model instance, and the requests that came from it."""

    def __init__(self, worker: Worker, connection: socket.socket) -> None:
        self._worker = worker
        self._socket = connection
        self._rows: dict[int, tuple[int, RowRequest]] = {}
        """Key and row, by the Executor's id."""
        self._ids: dict[int, int] = {}
        """The Executor's id, by key."""
        self._lock = threading.Lock()
        self._outbox: list[bytes] = []
        self._has_mail = threading.Condition()
        self._is_closed = False
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer_process: int = _CREDENTIALS.unpack(credentials)[0]

    def start(self) -> None:
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._write, name="writer", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Queue a frame; never waits."""
        with self._has_mail:
            self._outbox.append(data)
            self._has_mail.notify()

    # -- from the instance --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        frames = receive(self._socket)
        try:
            hello, _ = next(frames)
            if hello.get("hello") != VERSION:
                self.send(
                    frame({"failed": f"the repository speaks version {hello.get('hello')}, this executor {VERSION}"})
                )
                return
            ready = self._worker.wait_for_executor()
            if isinstance(ready, str):
                self.send(frame({"failed": ready}))
                return
            self.send(frame({"ready": VERSION}))
            executor, reader = ready
            try:
                for header, body in frames:
                    self._submit(executor, reader, header["submit"], body)
                    self._cancel(executor, header["cancel"])
            finally:
                self._cancel(executor, list(self._ids))
        except StopIteration:
            pass  # closed before it said anything
        except WireError as error:
            _logger.warning("the connection of a model instance ends; its requests are cancelled: %s", error)
        finally:
            self._close()

    def _submit(
        self, executor: BridgedExecutor, reader: RowReader, rows: list[dict[str, Any]], body: memoryview
    ) -> None:
        errors = []
        for row in rows:
            key = row["key"]
            try:
                tensors = {
                    name: array(value["array"], body) if isinstance(value, dict) else value
                    for name, value in row["tensors"].items()
                }
                wanted = reader.request(tensors, row["timeout_us"], row["parameters"])
                with self._lock:  # so that the first response finds the row
                    executor_id = executor.enqueue_request(wanted.request, listener=self._on_responses)
                    self._rows[executor_id] = key, wanted
                    self._ids[key] = executor_id
            except RequestError as error:
                errors.append([key, error.code, with_tensor_name(error)])
        if errors:
            self.send(frame({"errors": errors}))

    def _cancel(self, executor: BridgedExecutor, keys: Sequence[int]) -> None:
        for key in keys:
            executor_id = self._ids.get(key)
            if executor_id is not None:
                executor.cancel_request(executor_id)

    # -- to the instance ----------------------------------------------------------------------------------------------

    def _on_responses(self, responses: list[Response]) -> None:
        """On the loop's thread, once an iteration: all of it in one frame."""
        writer = FrameWriter()
        events, errors, lengths = [], [], []
        with self._lock:
            for response in responses:
                known = self._rows.get(response.request_id)
                if known is None:
                    continue  # it was cancelled meanwhile, and its final response came first
                key, row = known
                if response.is_final:
                    del self._rows[response.request_id]
                    del self._ids[key]
                if response.error is not None:
                    errors.append([key, response.error.code, with_tensor_name(response.error)])
                    continue
                result = response.result
                events.append(event(key, row, result, writer))
                if result.is_sequence_final:
                    lengths.append([result.usage.prompt_tokens, result.usage.completion_tokens])
        header: dict[str, Any] = {"events": events}
        if errors:
            header["errors"] = errors
        if lengths:
            header["lengths"] = lengths
        self.send(writer.frame(header))

    def _write(self) -> None:
        while True:
            with self._has_mail:
                self._has_mail.wait_for(lambda: self._outbox or self._is_closed)
                if not self._outbox:
                    break
                mail, self._outbox = self._outbox, []
            try:
                self._socket.sendall(b"".join(mail))
            except OSError:
                with self._has_mail:
                    self._outbox.clear()  # the instance is gone; the reader finds that out and closes
        self._socket.close()
        self._worker.remove(self)

    def _close(self) -> None:
        """Once what is in the outbox has been sent."""
        with self._has_mail:
            self._is_closed = True
            self._has_mail.notify()
