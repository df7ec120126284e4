"""The order in which waiting requests are looked at.

```
             push                       pop (smallest order key)
 arrival ───────────► [ heap of (order key, request) ] ───────────► admission
 pause, wake ───────►
```
FCFS, priority and deadline are three key functions of one heap. The key never changes while a request lives, so a
paused or woken request comes back to its own place. The fair queue holds one such heap for each tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from batch_manager.config import BatchManagerConfig, WaitingQueuePolicy
from batch_manager.request import Request, RequestState

OrderKey = tuple[float, int]


class WaitingQueue(Protocol):
    """Requests that wait to be admitted. `sequence` counts arrivals."""

    def order_key(self, request: Request, sequence: int) -> OrderKey:
        """The request's place among all live ones: set once, on arrival."""
        ...

    def push(self, request: Request) -> None: ...

    has_ranks: bool
    """Whether order keys rank waiting requests against running ones."""

    def peek(self) -> Request | None:
        """The first in line; finished ones are dropped on the way."""
        ...

    def pop(self) -> Request:
        """Take the request that `peek` returned just before out of the line."""
        ...

    def discard(self, request: Request) -> None:
        """`request`, which is in the queue, has just become finished."""
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` are computed for `request`."""
        ...

    def service(self, request: Request) -> float:
        """By how much the request stands back behind others because of what its like was served; 0 for all where that
        does not count."""
        ...

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Other tenant weights count from now on."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, in no order."""
        ...


class RequestHeap:
    """Requests by order key. A request that finishes stays until it is popped or every second entry is such a one."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, Request]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._entries) - self._num_finished

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries if request.state is not RequestState.FINISHED)

    def push(self, request: Request) -> None:
        heapq.heappush(self._entries, (request.order_key, request))

    def peek(self) -> Request | None:
        while self._entries:
            request = self._entries[0][1]
            if request.state is not RequestState.FINISHED:
                return request
            heapq.heappop(self._entries)
            self._num_finished -= 1
        return None

    def pop(self) -> Request:
        """Take out what `peek` returned."""
        return heapq.heappop(self._entries)[1]

    def discard(self) -> None:
        self._num_finished += 1
        if 2 * self._num_finished > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[1].state is not RequestState.FINISHED]
            heapq.heapify(self._entries)
            self._num_finished = 0


class OrderedQueue:
    """One line for all, ordered by `key`; equal keys in order of arrival."""

    has_ranks = True

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap = RequestHeap()

    def order_key(self, request: Request, sequence: int) -> OrderKey:
        return (self._key(request), sequence)

    def push(self, request: Request) -> None:
        self._heap.push(request)

    def peek(self) -> Request | None:
        return self._heap.peek()

    def pop(self) -> Request:
        return self._heap.pop()

    def discard(self, request: Request) -> None:  # noqa: ARG002
        self._heap.discard()

    def charge(self, request: Request, num_tokens: int) -> None:
        """One line for all: who was served how much does not count."""

    def service(self, request: Request) -> float:  # noqa: ARG002
        return 0.0

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """One line for all: tenants do not count."""

    def __iter__(self) -> Iterator[Request]:
        return iter(self._heap)


class Tenant:
    """One tenant's line in the fair queue."""

    __slots__ = ("heap", "is_listed", "service", "weight")

    def __init__(self, weight: float, service: float) -> None:
        self.weight = weight
        self.service = service
        """Tokens computed for it, per weight."""
        self.heap = RequestHeap()
        self.is_listed = False
        """Whether it has an entry in the order of tenants."""


class FairQueue:
    """Takes from the tenant that has been served the least, in tokens per weight (virtual token counters: Sheng et
    al., "Fairness in Serving Large Language Models", 2024).

    A tenant that comes back from idling starts at the smallest counter of those that wait: it neither hoards claims
    nor is punished. Counters only grow, so an entry of the order of tenants may be too small but never too large; it
    is corrected when it comes up.
    """

    has_ranks = False
    MAX_IDLE_TENANTS = 1024
    """So many tenants without a waiting request are remembered for the service they are ahead by."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}
        self._order: list[tuple[float, str]] = []
        self._floor = 0.0
        """The smallest service among waiting tenants when one was last chosen."""

    def order_key(self, request: Request, sequence: int) -> OrderKey:  # noqa: ARG002
        return (0.0, sequence)

    def service(self, request: Request) -> float:
        """Tokens per weight that the request's tenant has been served."""
        return self._tenant(request.tenant).service

    def push(self, request: Request) -> None:
        tenant = self._tenant(request.tenant)
        if not tenant.is_listed:
            tenant.service = max(tenant.service, self._floor)
            tenant.is_listed = True
            heapq.heappush(self._order, (tenant.service, request.tenant))
        tenant.heap.push(request)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) > 2 * self.MAX_IDLE_TENANTS:
                self._forget_idle_tenants()
            tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0), self._floor)
        return tenant

    def peek(self) -> Request | None:
        order = self._order
        while order:
            service, name = order[0]
            tenant = self._tenants[name]
            request = tenant.heap.peek()
            if request is None:
                heapq.heappop(order)
                tenant.is_listed = False
            elif service < tenant.service:
                heapq.heapreplace(order, (tenant.service, name))
            else:
                self._floor = max(self._floor, service)
                return request
        return None

    def pop(self) -> Request:
        return self._tenants[self._order[0][1]].heap.pop()

    def discard(self, request: Request) -> None:
        self._tenants[request.tenant].heap.discard()

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenant(request.tenant)
        tenant.service += num_tokens / tenant.weight

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.heap

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        for name, tenant in self._tenants.items():
            tenant.weight = weights.get(name, 1.0)

    def _forget_idle_tenants(self) -> None:
        """Drop those that would start at the floor anyway, then those that are ahead by least."""
        idle = sorted((tenant.service, name) for name, tenant in self._tenants.items() if not tenant.is_listed)
        for service, name in idle:
            if service > self._floor and len(self._tenants) <= self.MAX_IDLE_TENANTS:
                break
            del self._tenants[name]


def make_queue(config: BatchManagerConfig) -> OrderedQueue | FairQueue:
    """The waiting queue that `config` asks for."""
    match config.waiting_queue_policy:
        case WaitingQueuePolicy.FCFS:
            return OrderedQueue(lambda request: 0.0)  # noqa: ARG005
        case WaitingQueuePolicy.PRIORITY:
            ageing = config.priority_ageing
            if ageing is None:
                return OrderedQueue(lambda request: -request.priority)
            # Ageing moves every waiting request forward at the same speed, so their order never changes: the time of
            # comparison cancels out and the key is constant.
            return OrderedQueue(lambda request: request.arrival_time - ageing * request.priority)
        case WaitingQueuePolicy.DEADLINE:
            return OrderedQueue(lambda request: float("inf") if request.deadline is None else request.deadline)
        case WaitingQueuePolicy.FAIR:
            return FairQueue(config.tenant_weights)
