"""What one request holds."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.radix_tree import RootBlock
from batch_manager.kv.retention import BlockRetention, KvCacheRetentionConfig
from batch_manager.request import Request

NEVER = 1 << 62
"""More tokens than any request has."""


class Grant(NamedTuple):
    """Blocks of a table that one call added: those from `first_index` up to the next grant's."""

    first_index: int
    iteration: int
    call: str


class Holding:
    """A request's place in the tree, and where its blocks came from.

    `held` are nodes: with full attention only the deepest one (it keeps all before it), with an attention window one
    for each stored block that has not fallen out. Their blocks are the table's first `num_stored` ones.
    """

    __slots__ = ("grants", "held", "next_boundary", "num_retired", "num_stored", "request", "retention", "root", "tip")

    def __init__(
        self, request: Request, retention: KvCacheRetentionConfig | None, root: RootBlock, next_boundary: int
    ) -> None:
        self.request = request
        self.retention = retention
        self.root = root
        self.tip: CachedBlock = root
        """Node of the last stored block."""
        self.held: deque[CachedBlock] = deque()
        self.num_stored = 0
        """Leading blocks of the table whose content is in the tree."""
        self.num_retired = 0
        """Leading blocks of the table that fell out of the attention window."""
        self.next_boundary = next_boundary
        """`store` has nothing to do below so many tokens."""
        self.grants: list[Grant] = []

    def block_retention(self, index: int, tokens_per_block: int) -> BlockRetention | None:
        """What the request says of its block `index`; None when it says nothing at all."""
        if self.retention is None:
            return None
        start = index * tokens_per_block
        return self.retention.for_block(start, start + tokens_per_block, self.request.num_prompt_tokens)
