"""Responses of requests that are awaited rather than listened to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from executor.api.errors import ExecutorShutDownError, InvalidRequestError
from executor.api.response import Response


class ResponseQueue:
    """Keeps responses by request until they are taken. Safe to use from any thread.

    A request is known from `open` until its final response has been taken. Awaiting one that is not known is an
    error rather than an endless wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, deque[Response]] = {}
        self._is_closed = False

    def open(self, request_id: int) -> None:
        with self._changed:
            self._ready[request_id] = deque()

    def discard(self, request_id: int) -> None:
        """Forget a request that was opened but never enqueued."""
        with self._changed:
            self._ready.pop(request_id, None)

    def put(self, responses: list[Response]) -> None:
        """Add responses; this is the listener of requests that have no other."""
        with self._changed:
            for response in responses:
                self._ready[response.request_id].append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """No more responses will come: wake all who wait. What is ready can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_any(self, timeout: float | None) -> list[Response]:
        """All responses that are ready, waiting up to `timeout` seconds for the first.

        Empty after a timeout, or when the queue is closed meanwhile.

        Raises:
            ExecutorShutDownError: the queue is closed and nothing is left.
        """
        with self._changed:
            if self._is_closed and not any(self._ready.values()):
                raise ExecutorShutDownError("the executor is shut down, and every response has been taken")
            self._wait(lambda: any(self._ready.values()), timeout)
            return [response for request_id in list(self._ready) for response in self._take(request_id)]

    def take(self, request_id: int, timeout: float | None) -> list[Response]:
        """Responses of one request, waiting up to `timeout` seconds for the first; empty after a timeout.

        Raises:
            InvalidRequestError: no such request, or its final response was taken before.
        """
        with self._changed:
            if request_id not in self._ready:
                raise _unknown(request_id)
            return self._wait_and_take(request_id, timeout)

    def take_each(self, request_ids: Sequence[int], timeout: float | None) -> list[list[Response]]:
        """Responses of each request, waiting up to `timeout` seconds in all until each has some.

        A request that is not known has one response, an error: those who poll several requests until all have ended
        go on polling those that have.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        taken = []
        with self._changed:
            for request_id in request_ids:
                if request_id not in self._ready:
                    taken.append([Response(request_id, error=_unknown(request_id))])
                    continue
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                taken.append(self._wait_and_take(request_id, left))
        return taken

    def num_ready(self, request_id: int | None = None) -> int:
        """Responses that can be taken, of one request or of all."""
        with self._changed:
            if request_id is None:
                return sum(map(len, self._ready.values()))
            return len(self._ready.get(request_id, ()))

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        self._changed.wait_for(lambda: ready() or self._is_closed, timeout)

    def _wait_and_take(self, request_id: int, timeout: float | None) -> list[Response]:
        self._wait(lambda: bool(self._ready.get(request_id)), timeout)
        return self._take(request_id)

    def _take(self, request_id: int) -> list[Response]:
        waiting = self._ready.get(request_id)
        if not waiting:
            return []
        taken = list(waiting)
        waiting.clear()
        if taken[-1].is_final:
            del self._ready[request_id]
        return taken


def _unknown(request_id: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"request {request_id} is not known, or its final response was taken already", field="id"
    )
