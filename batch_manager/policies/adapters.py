"""Pages of the adapter (LoRA) cache: an adapter takes its pages once, however many running requests use it."""

from __future__ import annotations

import heapq

from batch_manager.request import Request, RequestState

UNLIMITED = 1 << 62


class AdapterPages:
    """Which adapters running requests use, and who waits for room for another one.

    When pages come free, of each adapter that fits then only the first parked request is woken: it stands for those
    behind it, which follow once it runs (they need no further page). If it ends while in line, the next takes its part.
    So what waits costs nothing but a look at each waiting adapter when pages come free.

    Args:
        num_pages: pages of the cache; None: adapters are not limited.
    """

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = UNLIMITED if num_pages is None else num_pages
        self.num_used_pages = 0
        self._users: dict[int, int] = {}
        """Running requests by adapter."""
        self._pages: dict[int, int] = {}
        """Pages by adapter in use."""
        self._parked: dict[int, list[tuple[tuple[float, int], Request]]] = {}
        """By adapter, a heap of parked requests by order key."""

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - self.num_used_pages

    def num_needed_pages(self, request: Request) -> int:
        """Pages to be free before `request` can run: none if its adapter is in use already."""
        if request.adapter_id is None or request.adapter_id in self._users:
            return 0
        return request.adapter_pages

    def fits(self, request: Request) -> bool:
        return self.num_needed_pages(request) <= self.num_free_pages

    def acquire(self, request: Request) -> list[Request]:
        """`request` runs. Returns parked requests of the same adapter."""
        adapter = request.adapter_id
        if adapter is None:
            return []
        self._users[adapter] = self._users.get(adapter, 0) + 1
        if self._users[adapter] > 1:
            return []
        self._pages[adapter] = request.adapter_pages
        self.num_used_pages += request.adapter_pages
        parked = self._parked.pop(adapter, ())
        return [waiting for _, waiting in parked if waiting.state is not RequestState.FINISHED]

    def release(self, request: Request) -> list[Request]:
        """`request` no longer runs. Returns the first parked request of each adapter that fits now."""
        adapter = request.adapter_id
        if adapter is None:
            return []
        self._users[adapter] -= 1
        if self._users[adapter]:
            return []
        del self._users[adapter]
        self.num_used_pages -= self._pages.pop(adapter)
        woken = [self._pop_first(waiting) for waiting in list(self._parked)]
        return [first for first in woken if first is not None]

    def forget(self, request: Request) -> list[Request]:
        """`request` ended in line. Returns the one that stands for its adapter instead, if any waits for it."""
        adapter = request.adapter_id
        if adapter is None or adapter not in self._parked:
            return []
        first = self._pop_first(adapter)
        return [] if first is None else [first]

    def park(self, request: Request) -> None:
        """`request` waits until there is room for its adapter."""
        assert request.adapter_id is not None
        heapq.heappush(self._parked.setdefault(request.adapter_id, []), (request.order_key, request))

    def reorder(self) -> None:
        """Order keys have changed."""
        for adapter, heap in self._parked.items():
            self._parked[adapter] = [(request.order_key, request) for _, request in heap]
            heapq.heapify(self._parked[adapter])

    def _pop_first(self, adapter: int) -> Request | None:
        """The first live parked request of an adapter, if it fits."""
        heap = self._parked[adapter]
        while heap and heap[0][1].state is RequestState.FINISHED:
            heapq.heappop(heap)
        first = heapq.heappop(heap)[1] if heap and self.fits(heap[0][1]) else None
        if not heap:
            del self._parked[adapter]
        return first
