"""The cache written down without any thought of cost: a dict from a prefix to what is known of its last block.

Prefixes are pairs of namespace and token tuple. Nothing here is shared with the manager: holders are sets of names, the
victim is the minimum over all leaves, every question is answered by looking at everything.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

Prefix = tuple[Hashable, tuple[int, ...]]


@dataclass
class Entry:
    created: int
    last_used: int = 0
    num_hits: int = 0
    priority: int = 35
    fence: int | None = None
    holders: set[str] = field(default_factory=set)


RANKS = {
    "lru": lambda e: e.last_used,
    "mru": lambda e: -e.last_used,
    "fifo": lambda e: e.created,
    "lfu": lambda e: (e.num_hits, e.last_used),
    "slru": lambda e: (e.num_hits >= 1, e.last_used),
}


class NaiveKvCache:
    def __init__(self, num_blocks: int, tokens_per_block: int, strategy: str) -> None:
        self.num_blocks = num_blocks
        self.size = tokens_per_block
        self.rank = RANKS[strategy]
        self.entries: dict[Prefix, Entry] = {}
        self.private: dict[str, int] = {}
        """Owner -> blocks that only it knows."""
        self.fenced_private: dict[int, int] = {}
        self.in_flight: set[int] = set()
        self.latest = -1
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # Questions

    def parent(self, prefix: Prefix) -> Prefix:
        """The last block of a prefix may be partly filled."""
        return prefix[0], prefix[1][: (len(prefix[1]) - 1) // self.size * self.size]

    def children(self, prefix: Prefix) -> list[Prefix]:
        return [p for p in self.entries if self.parent(p) == prefix]

    def path(self, prefix: Prefix) -> list[Prefix]:
        """Deepest first."""
        path = []
        while prefix[1]:
            path.append(prefix)
            prefix = self.parent(prefix)
        return path

    def is_evictable(self, prefix: Prefix) -> bool:
        entry = self.entries[prefix]
        return not entry.holders and entry.fence is None

    @property
    def num_used(self) -> int:
        return len(self.entries) + sum(self.private.values()) + sum(self.fenced_private.values())

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used + sum(self.is_evictable(p) for p in self.entries)

    def longest_match(self, namespace: Hashable, tokens: tuple[int, ...]) -> int:
        limit = len(tokens) - 1
        num_tokens = 0
        while num_tokens + self.size <= limit and (namespace, tokens[: num_tokens + self.size]) in self.entries:
            num_tokens += self.size
        return num_tokens

    def partial_lengths(self, namespace: Hashable, tokens: tuple[int, ...], start: int) -> dict[Prefix, int]:
        """For each block behind the match: how many of the next tokens it begins with."""
        wanted = tokens[start:-1][: self.size]
        lengths = {}
        for child in self.children((namespace, tokens[:start])):
            key = child[1][start:]
            length = 0
            while length < min(len(wanted), len(key)) and key[length] == wanted[length]:
                length += 1
            lengths[child] = length
        return lengths

    def can_take_over(self, prefix: Prefix) -> bool:
        return self.is_evictable(prefix) and not self.children(prefix)

    def takes_over(self, prefix: Prefix, num_matched: int, num_new: int, may_copy: bool) -> bool:
        """Whether reusing `num_matched` tokens of the block in part is done in place."""
        loses_nothing = num_matched == len(prefix[1]) - len(self.parent(prefix)[1])
        has_room = num_new <= self.num_blocks - self.num_used
        return self.can_take_over(prefix) and (loses_nothing or not has_room or not may_copy)

    # Changes

    def hold(self, prefix: Prefix, owner: str) -> None:
        for ancestor in self.path(prefix):
            self.entries[ancestor].holders.add(owner)
            self.entries[ancestor].fence = None

    def unhold(self, prefix: Prefix, owner: str) -> None:
        for ancestor in self.path(prefix):
            entry = self.entries[ancestor]
            entry.holders.discard(owner)
            if not entry.holders:
                entry.last_used = self.tick()
                entry.fence = self.latest if self.in_flight else None

    def take(self, owner: str, count: int) -> None:
        for _ in range(count):
            if self.num_used == self.num_blocks:
                victims = [p for p in self.entries if self.can_take_over(p)]
                del self.entries[min(victims, key=lambda p: (self.entries[p].priority, self.rank(self.entries[p])))]
            self.private[owner] = self.private.get(owner, 0) + 1

    def give_back(self, owner: str) -> None:
        count = self.private.pop(owner, 0)
        if self.in_flight and count:
            self.fenced_private[self.latest] = self.fenced_private.get(self.latest, 0) + count

    def store(self, prefix: Prefix, owner: str, priority: int) -> None:
        """`prefix` is a block longer than what `owner` stored before: its block becomes findable, or is given back."""
        self.private[owner] -= 1
        if prefix in self.entries:
            self.private["double"] = 1
            self.give_back("double")
        else:
            self.entries[prefix] = Entry(created=self.tick(), priority=priority)
        self.hold(prefix, owner)

    def begin_step(self, iteration: int) -> None:
        self.latest = iteration
        self.in_flight.add(iteration)

    def end_step(self, iteration: int) -> None:
        self.in_flight.remove(iteration)
        oldest = min(self.in_flight, default=self.latest + 1)
        self.fenced_private = {fence: n for fence, n in self.fenced_private.items() if fence >= oldest}
        for entry in self.entries.values():
            if entry.fence is not None and entry.fence < oldest:
                entry.fence = None
