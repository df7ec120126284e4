"""Requests that hold no blocks: those in line, and those parked beside the line until something happens.

```
 arrival, pause ──► in line (queue) ──► admission
                      ▲      │ prefix deferred, no adapter page, held, draining
                 wake │      ▼
                     parked (request.parked says why)
```
Parked requests cost nothing per iteration: whoever they wait for wakes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from batch_manager.config import BatchManagerConfig
from batch_manager.policies.queues import make_queue
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.request import Request


class WaitingRequests:
    """The line and the parked ones, counted together."""

    def __init__(self, config: BatchManagerConfig) -> None:
        self.queue = make_queue(config)
        self.num_requests = 0
        self.num_tokens = 0
        """Tokens known of all of them: what they have to compute if nothing is cached."""
        self.is_draining = False
        """Whether requests that have never run are parked."""
        self._num_arrivals = 0

    def arrive(self, request: Request, parked: WaitReason | None) -> None:
        """A new request takes its place; `parked`: beside the line until it is woken."""
        self._num_arrivals += 1
        request.order_key = self.queue.order_key(request, self._num_arrivals)
        request.parked = parked
        self.enter(request)

    def enter(self, request: Request) -> None:
        """A request that has no blocks (any more) waits."""
        self.num_requests += 1
        self.num_tokens += len(request.token_ids)
        if request.parked is None:
            self.put_in_line(request)

    def leave(self, request: Request) -> None:
        """A request that waited does so no longer."""
        self.num_requests -= 1
        self.num_tokens -= len(request.token_ids)

    def forget(self, request: Request) -> None:
        """A waiting request, parked or in line, has just become finished."""
        self.leave(request)
        if request.parked is None:
            self.queue.discard(request)

    def put_in_line(self, request: Request) -> None:
        """At its own place."""
        if self.is_draining and request.receipt.admission_time is None:
            request.parked = WaitReason(WaitCode.DRAINING, 1, 0)
        else:
            self.queue.push(request)

    def wake(self, requests: Iterable[Request]) -> None:
        """Parked requests stand in line again."""
        for request in requests:
            request.parked = None
            self.put_in_line(request)

    def drain(self) -> None:
        """Park everything that has never run, now and later."""
        self.is_draining = True
        in_line = self._take_all()
        for request in in_line:
            self.put_in_line(request)

    def resume(self, live: Iterable[Request]) -> None:
        """Undo `drain`."""
        self.is_draining = False
        self.wake(
            [request for request in live if request.parked is not None and request.parked.code is WaitCode.DRAINING]
        )

    @property
    def has_line(self) -> bool:
        """Whether anybody is in line, parked ones not counted."""
        return any(True for _ in self.queue)

    def reorder(self, config: BatchManagerConfig, live: Iterable[Request]) -> None:
        """Stand in the line that `config` asks for; arrivals keep their numbers."""
        in_line = self._take_all()
        self.queue = make_queue(config)
        for request in live:
            request.order_key = self.queue.order_key(request, request.order_key[1])
        for request in in_line:
            self.queue.push(request)

    def _take_all(self) -> list[Request]:
        taken = []
        while self.queue.peek() is not None:
            taken.append(self.queue.pop())
        return taken
