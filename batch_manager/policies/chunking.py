"""How the query rows of an iteration are shared between contexts (prompts): pure functions.

A context asks for `remaining` tokens and may take at most `limit` of them now. Every chunk but a context's last is a
multiple of the chunk unit. A chunk costs at least `min_rows` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from batch_manager.config import ContextChunkingPolicy


class ContextDemand(NamedTuple):
    """What one context asks for, in tokens."""

    remaining: int
    """Tokens until its last row."""
    limit: int
    """At most so many in this iteration (long-prompt cap), at most `remaining`."""
    num_drafts: int = 0
    """Draft tokens that could be verified together with its last row."""


class ChunkRules(NamedTuple):
    unit: int
    """Every chunk but a context's last is a multiple of it."""
    min_rows: int
    """Rows that a chunk costs at least."""

    def largest(self, demand: ContextDemand, rows: int) -> int:
        """The largest chunk that costs at most `rows`; 0: none."""
        if rows < self.min_rows:
            return 0
        size = min(demand.limit, rows)
        if size < demand.remaining:
            size -= size % self.unit
        return size

    def next_unit(self, demand: ContextDemand, size: int) -> int:
        """The chunk that is one unit longer than `size`, or as long as it may get."""
        longer = min(size + self.unit, demand.limit)
        if longer < demand.remaining:
            longer -= longer % self.unit
        return longer

    def cost(self, size: int) -> int:
        """Rows of a chunk."""
        return max(size, self.min_rows) if size else 0


class ChunkingPolicy(Protocol):
    """Shares rows. `claim` lets contexts be gathered one after the other; `share` then settles all of them, and gives
    every context that claimed something at least one token."""

    def claim(self, demand: ContextDemand, rows: int, rules: ChunkRules) -> int:
        """Rows that a further context is certain to get when `rows` are not yet claimed; 0: none."""
        ...

    def share(self, demands: Sequence[ContextDemand], rows: int, rules: ChunkRules) -> list[int]:
        """Tokens for each context; together they cost at most `rows`."""
        ...


class FirstComeFirstServed:
    """Earlier contexts take all they can."""

    def claim(self, demand: ContextDemand, rows: int, rules: ChunkRules) -> int:
        return rules.cost(rules.largest(demand, rows))

    def share(self, demands: Sequence[ContextDemand], rows: int, rules: ChunkRules) -> list[int]:
        sizes = []
        for demand in demands:
            size = rules.largest(demand, rows)
            rows -= rules.cost(size)
            sizes.append(size)
        return sizes


class EqualProgress:
    """Every context advances by one unit in turn until the rows are used up."""

    def claim(self, demand: ContextDemand, rows: int, rules: ChunkRules) -> int:
        cost = rules.cost(rules.next_unit(demand, 0))
        return cost if cost <= rows else 0

    def share(self, demands: Sequence[ContextDemand], rows: int, rules: ChunkRules) -> list[int]:
        sizes = [0] * len(demands)
        growing = list(range(len(demands)))
        while growing:
            still_growing = []
            for index in growing:
                size = sizes[index]
                longer = rules.next_unit(demands[index], size)
                extra = rules.cost(longer) - rules.cost(size)
                if longer > size and extra <= rows:
                    sizes[index] = longer
                    rows -= extra
                    still_growing.append(index)
            growing = still_growing
            num_rounds = self._num_safe_rounds(demands, sizes, growing, rows, rules)
            for index in growing:
                sizes[index] += num_rounds * rules.unit
            rows -= num_rounds * rules.unit * len(growing)
        return sizes

    def _num_safe_rounds(
        self,
        demands: Sequence[ContextDemand],
        sizes: Sequence[int],
        growing: Sequence[int],
        rows: int,
        rules: ChunkRules,
    ) -> int:
        """Further rounds in which every growing context certainly takes one whole unit: they are taken at once."""
        if not growing or any(sizes[index] < rules.min_rows for index in growing):
            return 0
        shortest = min(demands[index].limit - sizes[index] for index in growing)
        return min(shortest // rules.unit, rows // (rules.unit * len(growing)))


class WholeContext:
    """Without chunking: all remaining tokens, drafts included, or nothing."""

    def claim(self, demand: ContextDemand, rows: int, rules: ChunkRules) -> int:
        cost = rules.cost(demand.remaining + demand.num_drafts)
        return cost if cost <= rows else 0

    def share(self, demands: Sequence[ContextDemand], rows: int, rules: ChunkRules) -> list[int]:
        sizes = []
        for demand in demands:
            cost = self.claim(demand, rows, rules)
            rows -= cost
            sizes.append(demand.remaining if cost else 0)
        return sizes


def make_chunking(policy: ContextChunkingPolicy, enabled: bool) -> ChunkingPolicy:
    """The policy, or whole contexts where chunked context is off."""
    if not enabled:
        return WholeContext()
    if policy is ContextChunkingPolicy.EQUAL_PROGRESS:
        return EqualProgress()
    return FirstComeFirstServed()
