"""Deadlines of live requests, looked at in every iteration, also when nothing arrives."""

from __future__ import annotations

import heapq

from batch_manager.request import Request, RequestState


class DeadlineTimers:
    """Live requests with an allotted time, the next to expire first.

    One that finished earlier stays until its time comes or every second entry is such a one.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []
        self._num_finished = 0
        self._num_added = 0

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            self._num_added += 1
            heapq.heappush(self._entries, (request.deadline, self._num_added, request))

    def forget(self, request: Request) -> None:
        """`request` has just become finished."""
        if request.deadline is None:
            return
        self._num_finished += 1
        if 2 * self._num_finished > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[2].state is not RequestState.FINISHED]
            heapq.heapify(self._entries)
            self._num_finished = 0

    def pop_expired(self, now: float) -> Request | None:
        """A live request whose time is up, if there is one. It finishes before the next call."""
        entries = self._entries
        while entries and entries[0][0] <= now:
            request = heapq.heappop(entries)[2]
            if request.state is not RequestState.FINISHED:
                return request
            self._num_finished -= 1
        return None
