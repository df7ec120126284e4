"""Transfers between instances over links whose bandwidth they share.

```
 instance 0 ──out──►┐            ┌──in──► instance 2        a transfer crosses three links: the sender's port, the
 instance 1 ──out──►┴── fabric ──┴──in──► instance 3        fabric, the receiver's port; each link is shared by all
                                                            that cross it now, max-min fairly
```
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batch_manager.simulate.errors import SimulationError


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """What connects the instances. The defaults cost nothing."""

    bytes_per_second: float = math.inf
    """Of an instance's port, in each direction."""
    latency: float = 0.0
    """Seconds from the last byte sent until the receiver may use what came."""
    fabric_bytes_per_second: float = math.inf
    """Of what all transfers cross together."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "fabric_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise SimulationError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.latency < math.inf:
            raise SimulationError(f"latency is {self.latency} s; it must be at least 0 and finite")


def fair_shares(paths: Sequence[Sequence[Hashable]], capacities: Mapping[Hashable, float]) -> list[float]:
    """Max-min fair rates: nobody can get more without somebody getting less who has no more already.

    Args:
        paths: the links that each transfer crosses, at least one.
        capacities: of the links.

    Returns:
        A rate for each path. By progressive filling (Bertsekas and Gallager, "Data Networks", 6.5.2).
    """
    rates = [math.inf] * len(paths)
    left = dict(capacities)
    growing = set(range(len(paths)))
    while growing:
        users = Counter(link for index in growing for link in paths[index])
        tightest = min(users, key=lambda link: left[link] / users[link])
        share = left[tightest] / users[tightest]
        if share == math.inf:
            break
        for index in [index for index in growing if tightest in paths[index]]:
            rates[index] = share
            growing.remove(index)
            for link in paths[index]:
                left[link] = max(0.0, left[link] - share)
    return rates


class Transfer:
    """Bytes on their way from one instance to another."""

    def __init__(
        self, transfer_id: int, request_id: int, source: int, target: int, num_bytes: float, begin: float
    ) -> None:
        self.transfer_id = transfer_id
        self.request_id = request_id
        self.source = source
        self.target = target
        self.num_bytes = num_bytes
        self.begin = begin
        """Seconds."""
        self.num_bytes_left = num_bytes
        self.rate = 0.0
        """Bytes a second, until another transfer begins or ends."""

    @property
    def path(self) -> tuple[Hashable, ...]:
        return ("out", self.source), "fabric", ("in", self.target)

    @property
    def seconds_left(self) -> float:
        return self.num_bytes_left / self.rate if self.num_bytes_left else 0.0


class _Landing(NamedTuple):
    time: float
    transfer_id: int


class Network:
    """All transfers between instances. Times only grow from call to call."""

    def __init__(self, figures: NetworkFigures) -> None:
        self.figures = figures
        self._now = 0.0
        self._num_begun = 0
        self._sending: dict[int, Transfer] = {}
        self._landing: list[_Landing] = []
        """Sent in full, not there yet: a heap."""
        self._sent: dict[int, Transfer] = {}

    @property
    def num_transfers(self) -> int:
        """Begun and neither arrived nor dropped."""
        return len(self._sending) + len(self._sent)

    def begin(self, now: float, request_id: int, source: int, target: int, num_bytes: float) -> Transfer:
        self._advance(now)
        transfer = Transfer(self._num_begun, request_id, source, target, num_bytes, now)
        self._num_begun += 1
        self._sending[transfer.transfer_id] = transfer
        self._share()
        return transfer

    def drop(self, now: float, transfer: Transfer) -> None:
        """It will not arrive; what it took of the links is the others'."""
        self._advance(now)
        self._sending.pop(transfer.transfer_id, None)
        self._sent.pop(transfer.transfer_id, None)
        self._share()

    @property
    def next_event(self) -> float | None:
        """When the next transfer has been sent, or arrives; None: there is none."""
        times = [self._now + transfer.seconds_left for transfer in self._sending.values()]
        if self._landing:
            times.append(self._landing[0].time)
        return min(times, default=None)

    def take_arrived(self, now: float) -> list[Transfer]:
        """Transfers that have arrived by `now`, which is no later than `next_event`."""
        self._advance(now)
        # What is left after rounding would take less than the clock can tell apart.
        sent = [t for t in self._sending.values() if now + t.seconds_left <= now]
        for transfer in sent:
            del self._sending[transfer.transfer_id]
            self._sent[transfer.transfer_id] = transfer
            heapq.heappush(self._landing, _Landing(now + self.figures.latency, transfer.transfer_id))
        if sent:
            self._share()
        arrived = []
        while self._landing and self._landing[0].time <= now:
            landed = self._sent.pop(heapq.heappop(self._landing).transfer_id, None)
            if landed is not None:
                arrived.append(landed)
        return arrived

    def _advance(self, now: float) -> None:
        for transfer in self._sending.values():
            if transfer.rate == math.inf:
                transfer.num_bytes_left = 0.0
            else:
                transfer.num_bytes_left = max(0.0, transfer.num_bytes_left - transfer.rate * (now - self._now))
        self._now = now

    def _share(self) -> None:
        capacities: dict[Hashable, float] = {"fabric": self.figures.fabric_bytes_per_second}
        for transfer in self._sending.values():
            for link in (("out", transfer.source), ("in", transfer.target)):
                capacities[link] = self.figures.bytes_per_second
        rates = fair_shares([transfer.path for transfer in self._sending.values()], capacities)
        for transfer, rate in zip(self._sending.values(), rates, strict=True):
            transfer.rate = rate
