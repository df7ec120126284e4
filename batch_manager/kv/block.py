"""One block's content in the cache: a node of the reuse tree."""

from __future__ import annotations

from batch_manager.kv.keys import BlockKey, block_digest
from batch_manager.kv.retention import DEFAULT_PRIORITY, BlockRetention

NO_BLOCK = -1
"""In place of a block id: no device block. In a block table: a position outside the attention window, never read."""

NOT_FENCED = -1


def num_held(block_ids: list[int]) -> int:
    """Blocks that a block table names. O(entries)."""
    return len(block_ids) - block_ids.count(NO_BLOCK)


class CachedBlock:
    """The K and V of one full block of tokens behind one prefix, wherever they are.

    Equality is identity: the content is `key` behind the parent's content. A root has no parent and no content.

    ```
    held       num_holds > 0     a request, pin, lease or transfer needs it, or needs a block behind it
    fenced     num_holds == 0    released while a step that may touch it was in flight
    evictable  num_holds == 0    cached until somebody needs the space
    ```
    """

    __slots__ = (
        "_digest",
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

    def __init__(self, key: BlockKey, parent: CachedBlock | None, created: int, digest: bytes | None = None) -> None:
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
        """Iteration after whose end the block may be evicted."""
        self.priority = DEFAULT_PRIORITY
        self.duration: float | None = None
        """Seconds that `priority` lasts once the block is held by nobody."""
        self.expires_at: float | None = None
        self.created = created
        self.last_used = created
        """Ticks of the pool: an order, not a time."""
        self.num_hits = 0
        self._digest = digest

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def digest(self) -> bytes:
        """[32] identity for those outside who know blocks by digest; computed when first asked for."""
        chain = [self]
        while chain[-1]._digest is None:
            parent = chain[-1].parent
            assert parent is not None, "a root is made with its digest"
            chain.append(parent)
        known = chain.pop()
        while chain:
            node = chain.pop()
            assert known._digest is not None
            node._digest = block_digest(known._digest, node.key)
            known = node
        assert self._digest is not None
        return self._digest

    @property
    def retention(self) -> BlockRetention:
        return BlockRetention(self.priority, self.duration)

    @retention.setter
    def retention(self, retention: BlockRetention) -> None:
        self.priority, self.duration = retention

    def path(self) -> list[CachedBlock]:
        """The blocks from the first of the prefix to this one."""
        path = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def __repr__(self) -> str:
        return (
            f"CachedBlock(block_id={self.block_id}, holds={self.num_holds}, children={len(self.children)}, "
            f"priority={self.priority})"
        )
