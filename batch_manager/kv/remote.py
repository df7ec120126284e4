"""Requests whose first blocks another instance sends: admitted like any other, run once the blocks are there."""

from __future__ import annotations

from batch_manager.request import Request


class RemoteLoads:
    """Which admitted requests wait for blocks of another instance.

    ```
    allocate ─► admitted ──take_admitted──► (the executor asks the other instance)
                    └► waiting ── end: all there, or in vain ──► runs, or is admitted again
    ```
    """

    def __init__(self) -> None:
        self._admitted: list[Request] = []
        self._waiting: dict[int, Request] = {}

    def admit(self, request: Request) -> None:
        """`request` has its block table; what the cache had of it is in `num_computed_tokens`."""
        self._admitted.append(request)
        if request.num_remote_tokens > request.num_computed_tokens:
            self._waiting[request.request_id] = request

    def take_admitted(self) -> list[Request]:
        """Requests admitted since the last call that still hold their blocks, even where nothing of them is missing."""
        admitted, self._admitted = self._admitted, []
        return [request for request in admitted if request.num_remote_tokens]

    def is_waiting(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def end(self, request: Request) -> None:
        """The request waits no longer, and never will again: lost blocks are computed."""
        if self.is_waiting(request):
            del self._waiting[request.request_id]
        request.num_remote_tokens = 0
