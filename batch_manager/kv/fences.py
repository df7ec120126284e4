"""Steps in flight: what was released while they run waits until they are done."""

from __future__ import annotations

from typing import NamedTuple

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.errors import StepOrderError


class Released(NamedTuple):
    """What was released behind one fence."""

    private_blocks: list[int]
    """Block ids whose content nobody else knows."""
    cached_blocks: list[CachedBlock]


class StepFences:
    """The steps in flight, and for each what was released since it began.

    A block released now may be touched by any step in flight now, so it waits behind the latest one and, since steps
    may end in any order, behind all older ones.
    """

    def __init__(self) -> None:
        self.latest = -1
        """The last iteration that began."""
        self.in_flight: set[int] = set()
        self.behind: dict[int, Released] = {}

    def begin(self, iteration: int) -> None:
        if iteration <= self.latest:
            raise StepOrderError(f"step {iteration} begins after step {self.latest}; iterations must increase")
        self.latest = iteration
        self.in_flight.add(iteration)
        self.behind[iteration] = Released([], [])

    def end(self, iteration: int) -> dict[int, Released]:
        """Returns what no step in flight can touch any more, by the iteration it waited for."""
        if iteration not in self.in_flight:
            raise StepOrderError(
                f"step {iteration} ends, but the steps in flight are {sorted(self.in_flight)}; "
                "each step ends once, after it began"
            )
        self.in_flight.remove(iteration)
        oldest = min(self.in_flight, default=self.latest + 1)
        opened = [behind for behind in self.behind if behind < oldest]
        return {behind: self.behind.pop(behind) for behind in opened}

    @property
    def newest_bucket(self) -> Released:
        """Where a release goes while steps are in flight."""
        return self.behind[self.latest]
