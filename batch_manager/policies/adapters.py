"""Pages of the adapter (LoRA) cache: an adapter takes its pages once, however many running requests use it."""

from __future__ import annotations

from batch_manager.request import Request, RequestState

UNLIMITED = 1 << 62


class AdapterPages:
    """Which adapters running requests use, and who waits for room for another one.

    `num_pages` `None`: adapters are not limited.
    """

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = UNLIMITED if num_pages is None else num_pages
        self.num_used_pages = 0
        self._users: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        self._parked: dict[int, list[Request]] = {}

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
        """`request` runs. Returns parked requests of the same adapter: they need no further page."""
        adapter = request.adapter_id
        if adapter is None:
            return []
        self._users[adapter] = self._users.get(adapter, 0) + 1
        if self._users[adapter] > 1:
            return []
        self._pages[adapter] = request.adapter_pages
        self.num_used_pages += request.adapter_pages
        return self._wake(adapter)

    def release(self, request: Request) -> list[Request]:
        """`request` no longer runs. Returns parked requests for whose adapters there is room now."""
        adapter = request.adapter_id
        if adapter is None:
            return []
        self._users[adapter] -= 1
        if self._users[adapter]:
            return []
        del self._users[adapter]
        self.num_used_pages -= self._pages.pop(adapter)
        fitting = [waiting for waiting, requests in self._parked.items() if any(map(self.fits, requests))]
        return [request for waiting in fitting for request in self._wake(waiting)]

    def holders(self) -> dict[int, int]:
        """Pages by adapter in use."""
        return dict(self._pages)

    def park(self, request: Request) -> None:
        """`request` waits until there is room for its adapter."""
        assert request.adapter_id is not None
        self._parked.setdefault(request.adapter_id, []).append(request)

    def _wake(self, adapter: int) -> list[Request]:
        parked = self._parked.pop(adapter, ())
        return [request for request in parked if request.state is not RequestState.FINISHED]
