"""Who may hold KV blocks: what a waiting request must find free before it is admitted.

```
 blocks of the pool
 | held by running requests | fenced | free (evictable cached ones included)                       |
                                     | reserved for the growth of running ones | can be admitted to |
```
Policies differ in two things: how many tokens' blocks a request asks for, and what of the free blocks is reserved for
those that run. Running requests take their blocks step by step under every policy; when one cannot, the last started
one is paused, which under `GUARANTEED_NO_EVICT` and `STATIC_BATCH` the reservations rule out.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from batch_manager.config import CapacitySchedulerPolicy
from batch_manager.policies.pause_governor import PauseGovernor
from batch_manager.reasons import WaitCode
from batch_manager.request import Request


class Reservations:
    """Blocks that running requests may still take until they end.

    `protected` is the part of those that must not be paused again.
    """

    __slots__ = ("protected", "total")

    def __init__(self) -> None:
        self.total = 0
        self.protected = 0

    def add(self, num_blocks: int, is_protected: bool) -> None:
        self.total += num_blocks
        if is_protected:
            self.protected += num_blocks


class Entry(NamedTuple):
    """What a request has to find in order to be admitted."""

    num_tokens: int
    """Positions for which blocks are asked."""
    num_withheld_blocks: int
    """Of the free blocks, those kept for others."""
    code: WaitCode
    """What the request waits for if they are not there."""


class CapacityPolicy(Protocol):
    defers_prefixes: bool
    """Whether a request waits for a prefix that another one is computing."""
    stops_at_adapter_shortfall: bool
    """Whether requests behind one whose adapter has no room wait too."""

    pauses_lower_ranks: bool
    """Whether running requests are paused for a waiting one that ranks before them."""

    def is_open(self, num_running: int) -> bool:
        """Whether requests may be admitted in this iteration, given those that ran before it."""
        ...

    def entry(self, request: Request, is_protected: bool, reservations: Reservations) -> Entry: ...


def tokens_to_completion(request: Request) -> int:
    """Positions whose keys and values will exist at the end: those of the last token are never computed."""
    return max(len(request.token_ids), request.max_num_tokens - 1)


class GuaranteedNoEvict:
    """Reserve to completion. A block shortfall stops admission, an adapter-page shortfall skips the request."""

    defers_prefixes = True
    stops_at_adapter_shortfall = False
    pauses_lower_ranks = False

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, is_protected: bool, reservations: Reservations) -> Entry:  # noqa: ARG002
        return Entry(tokens_to_completion(request), reservations.total, WaitCode.KV_RESERVATION)


class StaticBatch(GuaranteedNoEvict):
    """As no-evict, once everything that ran has ended."""

    defers_prefixes = False

    def is_open(self, num_running: int) -> bool:
        return num_running == 0


class MaxUtilization:
    """Blocks for the context, now. A request that was paused too often must find its blocks to completion, and is then
    protected; that bounds the pauses of every request."""

    defers_prefixes = True
    stops_at_adapter_shortfall = True
    pauses_lower_ranks = True

    def __init__(self, governor: PauseGovernor) -> None:
        self._governor = governor

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, is_protected: bool, reservations: Reservations) -> Entry:
        if is_protected:
            return Entry(tokens_to_completion(request), reservations.protected, WaitCode.KV_RESERVATION)
        headroom = self._governor.headroom(reservations.total - reservations.protected)
        code = WaitCode.PAUSE_HEADROOM if headroom else WaitCode.KV_CAPACITY
        return Entry(len(request.token_ids), reservations.protected + headroom, code)


class MaxRequests:
    """No KV cache: only the number of requests counts."""

    defers_prefixes = False
    stops_at_adapter_shortfall = True
    pauses_lower_ranks = False

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, is_protected: bool, reservations: Reservations) -> Entry:  # noqa: ARG002
        return Entry(0, 0, WaitCode.KV_CAPACITY)


def make_capacity(policy: CapacitySchedulerPolicy, governor: PauseGovernor) -> CapacityPolicy:
    match policy:
        case CapacitySchedulerPolicy.MAX_UTILIZATION:
            return MaxUtilization(governor)
        case CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            return GuaranteedNoEvict()
        case CapacitySchedulerPolicy.STATIC_BATCH:
            return StaticBatch()
        case CapacitySchedulerPolicy.MAX_REQUESTS:
            return MaxRequests()
