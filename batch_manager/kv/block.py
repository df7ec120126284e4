"""One block's content in the cache: a node of the radix tree."""

from __future__ import annotations

from typing import Any

from batch_manager.kv.retention import DEFAULT_PRIORITY

NO_BLOCK = -1
"""In place of a block id: no device block. In a block table: a position outside the attention window, never read."""

NOT_FENCED = -1

BlockKey = tuple[Any, ...]
"""The block's token ids, followed by tags where the block holds other content than text (see `keys.py`)."""


class CachedBlock:
    """The K and V of one full block of tokens behind one prefix, wherever they are.

    Equality is identity: the content is `key` behind the parent's content. A root has no parent and no content.

    ```
    held       num_holds > 0     a request, pin or transfer needs it, or holds a block behind it
    fenced     num_holds == 0    released while a step that may touch it was in flight
    evictable  num_holds == 0    cached until somebody needs the space
    ```
    """

    __slots__ = (
        "block_id",
        "children",
        "created",
        "duration",
        "expires_at",
        "fence",
        "is_attached",
        "key",
        "last_used",
        "num_hits",
        "num_holds",
        "num_resident_children",
        "ordered_keys",
        "parent",
        "priority",
    )

    def __init__(self, key: BlockKey, parent: CachedBlock | None, created: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[BlockKey, CachedBlock] = {}
        self.ordered_keys: list[BlockKey] | None = None
        """The children's keys in lexicographic order; kept only once somebody searched here for a partial match."""
        self.is_attached = True
        """Whether a walk from the root finds it."""
        self.block_id = NO_BLOCK
        """Device block that holds the content."""
        self.num_holds = 0
        self.num_resident_children = 0
        """Children that have a device block."""
        self.fence = NOT_FENCED
        """Iteration after which the block may be evicted."""
        self.priority = DEFAULT_PRIORITY
        self.duration: float | None = None
        """Seconds that `priority` lasts once the block is held by nobody."""
        self.expires_at: float | None = None
        self.created = created
        self.last_used = created
        """Ticks of the pool: order, not time."""
        self.num_hits = 0

    def __repr__(self) -> str:
        return (
            f"CachedBlock(block_id={self.block_id}, holds={self.num_holds}, children={len(self.children)}, "
            f"priority={self.priority})"
        )
