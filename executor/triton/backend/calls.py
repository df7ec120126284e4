"""A Triton request whose rows are answered by calls to other models, joined into its responses."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.responses import joined, response, send_final


class CallError(Exception):
    """Another model answered with an error, which is the argument."""


class JoinedCall:
    """One request. Safe to use from the threads of its rows; exactly one of its responses is the final one."""

    def __init__(self, request: Any, num_rows: int, is_decoupled: bool) -> None:
        self.request_id: str = request.request_id()
        self.inner_id = uuid.uuid4().hex
        """The id of its calls, so that they can be stopped whatever ids clients choose."""
        self.wanted = frozenset(request.requested_output_names())
        self.is_stopped = False
        """Whether it is to end with what it has."""
        self.has_ended = False
        self.num_running = num_rows
        """Rows whose threads have not ended; its owner counts."""
        self._sender = request.get_response_sender()
        self._is_decoupled = is_decoupled
        self._timeout_us: int = request.timeout()
        self._arrival = time.monotonic()
        self._lock = threading.Lock()
        self._num_open = num_rows
        self._rows: list[dict[str, Any] | None] = [None] * num_rows
        """Outputs that wait for the other rows, where there may be one response only."""

    def remaining_microseconds(self, now: float) -> int:
        """Of the client's timeout; 0: it has none. A time that is up is told as the shortest one."""
        if not self._timeout_us:
            return 0
        return max(1, self._timeout_us - int((now - self._arrival) * 1e6))

    def is_abandoned(self) -> bool:
        """Whether its client has left. Triton crashes when it is asked that of a request that has ended."""
        with self._lock:
            return not self.has_ended and bool(self._sender.is_cancelled())

    def send(self, row: int, outputs: Mapping[str, Any]) -> None:
        """Send what a row has so far, unless the request has ended with an error meanwhile."""
        with self._lock:
            if not self.has_ended:
                self._sender.send(response(self._arrays(row, outputs)))

    def end_row(self, row: int, outputs: Mapping[str, Any]) -> None:
        """Send the last of a row, or keep it until all rows have ended."""
        with self._lock:
            if self.has_ended:
                return
            self._num_open -= 1
            self.has_ended = self._num_open == 0
            arrays = self._arrays(row, outputs)
            if self._is_decoupled and not self.has_ended:
                self._sender.send(response(arrays))
            elif self._is_decoupled:
                send_final(self._sender, response(arrays))
            else:
                self._rows[row] = arrays
                if self.has_ended:
                    rows = [each for each in self._rows if each is not None]
                    send_final(self._sender, response(rows[0] if len(rows) == 1 else joined(rows)))

    def fail(self, error: Any) -> None:
        """End it with an error."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            send_final(self._sender, pb_utils.InferenceResponse(error=error))

    def _arrays(self, row: int, outputs: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {name: values for name, values in outputs.items() if name in self.wanted}
        if "batch_index" in arrays:
            arrays["batch_index"] = np.array([[row]], np.int32)
        return arrays
