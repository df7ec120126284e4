"""The connection of one model instance to the Executor's process, which the first instance starts.

```
stub of instance 0 ──┐ lock, bind, listen, spawn        KEY.sock, KEY.lock: see runtime.py
stub of instance 1 ──┤ lock, connect                    KEY: server process, model, its parameters
                     └──────────► executor process: ends when its last connection does
```
Whoever dies, by whatever signal, closes its sockets, and that is all the others need to know: the Executor's process
cancels what a connection asked for, and an instance answers what was open with an error and connects again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.triton.backend.runtime import runtime_directory, server_process
from executor.triton.backend.wire import VERSION, WireError, frame, receive

_RECONNECT_SECONDS = (0.1, 0.5, 2.0, 5.0)
_EXIT_SECONDS = 10
_FOREIGN_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
"""What makes Triton's interpreter run would break the Executor's."""


class LinkError(Exception):
    """The Executor's process cannot be reached, or refused to start: one line that says why."""


class Link:
    """Sends frames from any thread; hands received ones to `on_frame`, on a thread of its own.

    When the connection is lost, `on_lost` is called with the reason and a new process is started.
    """

    def __init__(
        self,
        worker: list[str],
        settings: dict[str, Any],
        on_frame: Callable[[dict[str, Any], memoryview], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Connect, starting the process if need be, and wait until it is ready.

        Args:
            worker: the command that runs the Executor's process.
            settings: what it needs to know; instances with equal settings on one server share a process.
            on_frame: gets header and body.
            on_lost: gets the reason.

        Raises:
            LinkError: it does not start, and why.
        """
        self._worker = worker
        self._settings = settings
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._send_lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        self._frames = self._connect()
        self._thread = threading.Thread(target=self._run, name="executor-link", daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Send a frame.

        Raises:
            LinkError: there is no connection now.
        """
        with self._send_lock:
            if self._socket is None:
                raise LinkError("the executor process is gone and is being started again; try again later")
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise LinkError(f"the executor process is gone: {error}") from error

    def close(self) -> None:
        """Disconnect. The process ends when the last instance has."""
        self._is_closing = True
        with self._send_lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(timeout=5)
        if self._process is not None:
            self._process.poll()  # other instances may use it still

    def _run(self) -> None:
        while True:
            reason = "the executor process ended"
            try:
                for header, body in self._frames:
                    self._on_frame(header, body)
            except WireError as error:
                reason = f"the executor process ended: {error}"
            except Exception as error:  # noqa: BLE001 - whatever it is, no request may wait for ever
                reason = f"the executor process was left: what it sent raised {error!r}"
            with self._send_lock:
                connection, self._socket = self._socket, None
            if connection is not None:
                connection.close()
            if self._is_closing:
                return
            self._on_lost(reason)
            if not self._reconnect():
                return

    def _reconnect(self) -> bool:
        """Try until it works; False: closed meanwhile."""
        attempt = 0
        while not self._is_closing:
            try:
                self._frames = self._connect()
            except LinkError:
                time.sleep(_RECONNECT_SECONDS[min(attempt, len(_RECONNECT_SECONDS) - 1)])
                attempt += 1
            else:
                return True
        return False

    def _connect(self) -> Any:
        """Connect and wait for the process to be ready; returns the frames that follow."""
        connection, process = self._open()
        frames = receive(connection)
        try:
            connection.sendall(frame({"hello": VERSION}))
            answer, _ = next(frames)
        except (StopIteration, WireError, OSError):
            connection.close()
            if process is None:  # another instance's, which was just ending
                return self._connect()
            status = process.wait(timeout=_EXIT_SECONDS)
            raise LinkError(f"the executor process ended with status {status} before it was ready") from None
        if "failed" in answer:
            raise LinkError(answer["failed"])
        self._process = process
        with self._send_lock:
            self._socket = connection
        return frames

    def _open(self) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """A connection to the process of this server and these settings, which may be loading still; and the process,
        where this instance had to start it."""
        process = None
        directory = runtime_directory()
        server = server_process()
        text = json.dumps([server, self._worker, self._settings], sort_keys=True)
        key = f"{server}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        path = directory / f"{key}.sock"
        with (directory / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
                process = self._spawn(path, connection)
        return connection, process

    def _spawn(self, path: Path, connection: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process on a socket that listens already, so that nobody has to wait for it to."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(128)
            connection.connect(str(path))
            environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
            command = [*self._worker, "--socket-fd", str(listener.fileno())]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    env=environment,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                path.unlink(missing_ok=True)
                raise LinkError(f"executor_worker_path: {command[0]} cannot be run: {error.strerror}") from error
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(self._settings).encode())
            process.stdin.close()
        except BrokenPipeError:
            raise LinkError(f"executor_worker_path: {command[0]} ended at once; see the log above") from None
        return process
