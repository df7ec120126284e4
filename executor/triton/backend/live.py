"""Triton requests whose final response has not been sent, and the rows they are made of.

```
Triton request ── Batch ── Row 0, Row 1, ...        a row is one request of the Executor, known by its key
```
Exactly one response of a batch is the final one, whoever comes first: its last row, an error, a client that leaves.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from executor.triton.backend.responses import PREFIX_TOKENS, error_response, joined, output_arrays, response, send_final


class Batch:
    """One Triton request."""

    __slots__ = ("has_ended", "is_decoupled", "keys", "lock", "num_open", "request_id", "rows", "sender", "wanted")

    def __init__(self, request: Any, keys: range, is_decoupled: bool) -> None:
        self.sender = request.get_response_sender()
        self.request_id: str = request.request_id()
        self.wanted = frozenset(request.requested_output_names())
        self.keys = keys
        self.num_open = len(keys)
        self.is_decoupled = is_decoupled
        self.has_ended = False
        self.lock = threading.Lock()
        """Held while something is sent, so that nothing follows the final response."""
        self.rows: list[dict[str, Any] | None] = [None] * len(keys)
        """Outputs that wait for the other rows, where there may be one response only."""

    def is_abandoned(self) -> bool:
        """Whether its client has left. Triton crashes when it is asked that of a request that has had its last
        response, so nobody else sends one meanwhile."""
        with self.lock:
            return not self.has_ended and bool(self.sender.is_cancelled())


class Row:
    """One row of a batch."""

    __slots__ = ("batch", "index", "streams", "tails")

    def __init__(self, batch: Batch, index: int, streams: bool) -> None:
        self.batch = batch
        self.index = index
        self.streams = streams
        self.tails: dict[int, list[int]] = defaultdict(list)
        """The last tokens that were streamed, by sequence."""


class LiveBatches:
    """All of them. Safe to use from any thread; while one batch's response is sent, others are not held up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, Row] = {}
        self._batches: dict[int, Batch] = {}
        self._next_key = 1

    def reserve(self, num_rows: int) -> range:
        """Keys for so many rows."""
        with self._lock:
            keys = range(self._next_key, self._next_key + num_rows)
            self._next_key += num_rows
            return keys

    def add(self, batch: Batch, streams: list[bool]) -> None:
        with self._lock:
            self._batches[batch.keys.start] = batch
            for index, key in enumerate(batch.keys):
                self._rows[key] = Row(batch, index, streams[index])

    def snapshot(self) -> list[Batch]:
        """Those that are live now."""
        with self._lock:
            return list(self._batches.values())

    def keys_of(self, request_id: str) -> list[int]:
        """The open rows of all batches whose Triton request id this is."""
        return [
            key
            for batch in self.snapshot()
            if batch.request_id == request_id
            for key in batch.keys
            if key in self._rows
        ]

    def batch_of(self, key: int) -> Batch | None:
        row = self._rows.get(key)
        return None if row is None else row.batch

    def deliver(self, events: Iterable[list[Any]], body: memoryview) -> list[int]:
        """Send what the Executor tells: `[key, sequence, token ids, finish reason, is final, extras]` each.

        A batch whose response cannot be made or sent ends with an error, so that no stream goes on without a token.

        Returns:
            Rows that the Executor has to be told to cancel.
        """
        to_cancel = []
        for event in events:
            row = self._rows.get(event[0])
            if row is None:
                continue  # its client left, or another row of its batch failed
            try:
                self._deliver(row, event, body)
            except Exception as error:  # noqa: BLE001 - it concerns this batch alone, whatever it is
                to_cancel += self.fail(row.batch, "INTERNAL", f"a response could not be sent: {error!r}")
        return to_cancel

    def _deliver(self, row: Row, event: list[Any], body: memoryview) -> None:
        key, sequence, token_ids, finish_reason, is_final, extras = event
        batch = row.batch
        with batch.lock:
            if batch.has_ended:
                return
            tail = row.tails[sequence] if row.streams else []
            arrays = output_arrays(
                batch.wanted, token_ids, tail, row.index, sequence, finish_reason, extras or {}, body
            )
            if row.streams:
                row.tails[sequence] = (tail + token_ids)[-PREFIX_TOKENS:]
            is_last = is_final and batch.num_open == 1
            message = _message(batch, row, arrays, is_last)
            if is_final:  # from here on it counts as told
                batch.num_open -= 1
                self._forget([key], batch if is_last else None)
            if is_last:
                send_final(batch.sender, message)
            elif message is not None:
                batch.sender.send(message)

    def fail(self, batch: Batch, code: str, message: str) -> list[int]:
        """End a batch with an error; returns the rows that the Executor still has to be told to cancel."""
        with batch.lock:
            if batch.has_ended:
                return []
            open_keys = self._forget(batch.keys, batch)
            send_final(batch.sender, error_response(code, message))
        return open_keys

    def _forget(self, keys: Iterable[int], ended: Batch | None) -> list[int]:
        """Drop rows, and the batch that ends with them; returns those that were open."""
        with self._lock:
            open_keys = [key for key in keys if self._rows.pop(key, None) is not None]
            if ended is not None:
                ended.has_ended = True
                self._batches.pop(ended.keys.start, None)
        return open_keys


def _message(batch: Batch, row: Row, arrays: dict[str, Any], is_last: bool) -> Any:
    """The response to send now; `None` where the other rows are waited for."""
    if batch.is_decoupled:
        return response(arrays)
    batch.rows[row.index] = arrays
    if not is_last:
        return None
    rows = [outputs for outputs in batch.rows if outputs is not None]
    return response(rows[0] if len(rows) == 1 else joined(rows))
