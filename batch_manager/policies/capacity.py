"""Who may hold KV blocks: what a waiting request must find free before it is admitted.

```
 blocks of the pool
 | held by running requests | fenced | free (evictable cached ones included)                       |
                                     | reserved for the growth of running ones | can be admitted to |
```
Policies differ in two things: how many tokens' blocks a request asks for, and what of the free blocks is reserved for
those that run. Running requests take their blocks step by step under every policy; when one cannot, the last started
one is paused, which under `GUARANTEED_NO_EVICT` and `STATIC_BATCH` the reservations rule out (unless the policy was
changed to them while more was running).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from batch_manager.config import CapacitySchedulerPolicy
from batch_manager.policies.pause_governor import PauseGovernor
from batch_manager.reasons import WaitCode
from batch_manager.request import Request


class Reservations:
    """What running requests may still need, in blocks."""

    __slots__ = ("growth", "num_blocks", "protected")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """Of the whole pool."""
        self.growth = 0
        """Blocks they may still take until they end."""
        self.protected = 0
        """Blocks to completion, those held included, of the ones that must not be paused again."""


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

    def entry(self, request: Request, num_protected_blocks: int, reservations: Reservations) -> Entry:
        """What `request` must find; `num_protected_blocks`: to completion, if it will be protected, otherwise 0."""
        ...


def tokens_to_completion(request: Request) -> int:
    """Positions whose keys and values will exist at the end: those of the last token are never computed."""
    return request.max_num_tokens - 1


class GuaranteedNoEvict:
    """Reserve to completion. A block shortfall stops admission, an adapter-page shortfall skips the request."""

    defers_prefixes = True
    stops_at_adapter_shortfall = False
    pauses_lower_ranks = False

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, num_protected_blocks: int, reservations: Reservations) -> Entry:  # noqa: ARG002
        return Entry(tokens_to_completion(request), reservations.growth, WaitCode.KV_RESERVATION)


class StaticBatch(GuaranteedNoEvict):
    """As no-evict, once everything that ran has ended."""

    defers_prefixes = False

    def is_open(self, num_running: int) -> bool:
        return num_running == 0


class MaxUtilization:
    """Blocks for the context, now.

    A request that was paused too often is protected once it is admitted again: others are paused for it, whatever
    their order, and never it. So that this can be kept, it is admitted only while the blocks to completion of all
    protected requests fit the pool together. That bounds the pauses of every request.
    """

    defers_prefixes = True
    stops_at_adapter_shortfall = True
    pauses_lower_ranks = True

    def __init__(self, governor: PauseGovernor) -> None:
        self._governor = governor

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, num_protected_blocks: int, reservations: Reservations) -> Entry:
        num_tokens = len(request.token_ids)
        if num_protected_blocks > reservations.num_blocks - reservations.protected:
            return Entry(num_tokens, reservations.num_blocks, WaitCode.KV_RESERVATION)
        headroom = self._governor.headroom(reservations.growth)
        return Entry(num_tokens, headroom, WaitCode.PAUSE_HEADROOM if headroom else WaitCode.KV_CAPACITY)


class MaxRequests:
    """No KV cache: only the number of requests counts."""

    defers_prefixes = False
    stops_at_adapter_shortfall = True
    pauses_lower_ranks = False

    def is_open(self, num_running: int) -> bool:  # noqa: ARG002
        return True

    def entry(self, request: Request, num_protected_blocks: int, reservations: Reservations) -> Entry:  # noqa: ARG002
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
