"""The reuse tree: which content is cached behind which prefix.

```
roots   {namespace: root}            namespace = (adapter, salt), by name: an adapter 7 is not a salt 7
          root
          ├── (t0 .. t15)            one node for each full block; the edge is the block's token ids,
          │   ├── (t16 .. t31)       compared in full, so equal hashes never share anything
          │   └── (t16 .. t29, u, v)
          └── (u0 .. u15)
```
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.keys import BlockKey, Namespace, is_plain, namespace_digest


def common_prefix_length(left: BlockKey, right: BlockKey) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


class RootBlock(CachedBlock):
    """The empty prefix of a namespace. Never evicted: no hold counted on it can be the last one."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__((), None, 0, namespace_digest(namespace))
        self.namespace = namespace
        self.num_holds = 1

    @property
    def is_unused(self) -> bool:
        return not self.children and self.num_holds == 1


class RadixTree:
    """Nodes and edges only: knows nothing of pools, holds or time."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, RootBlock] = {}
        self.num_nodes = 0

    def root(self, namespace: Namespace) -> RootBlock:
        """The namespace's root, made when there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = RootBlock(namespace)
        return root

    def insert(self, parent: CachedBlock, key: BlockKey, created: int) -> CachedBlock:
        """A new node behind `parent`, which must be attached and have no child `key`."""
        node = parent.children[key] = CachedBlock(key, parent, created)
        if parent.ordered_keys is not None:
            insort(parent.ordered_keys, key)
        self.num_nodes += 1
        return node

    def detach(self, node: CachedBlock) -> list[CachedBlock]:
        """Take `node` and all behind it out of the tree; returns them, parents first."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.ordered_keys is not None:
            del parent.ordered_keys[bisect_left(parent.ordered_keys, node.key)]
        detached = [node, *self.behind(node)] if node.children else [node]
        for gone in detached:
            gone.is_attached = False
        self.num_nodes -= len(detached)
        if isinstance(parent, RootBlock):
            self.drop_root_if_unused(parent)
        return detached

    def detach_all(self) -> list[CachedBlock]:
        """Empty the tree; returns what was in it, parents first."""
        detached = list(self)
        for gone in (*detached, *self.roots.values()):
            gone.is_attached = False
        self.roots.clear()
        self.num_nodes = 0
        return detached

    def drop_root_if_unused(self, root: RootBlock) -> None:
        """Salts come and go by the thousand: a root with nothing behind it is not worth its memory."""
        if root.is_attached and root.is_unused:
            root.is_attached = False
            del self.roots[root.namespace]

    def best_partial_child(self, parent: CachedBlock, tokens: BlockKey) -> tuple[CachedBlock, int] | None:
        """The child that shares the longest beginning with `tokens`, and how many tokens that is; None if none does.

        In lexicographic order that child is a neighbour of `tokens`, so the cost is logarithmic in the children. Blocks
        with tags are never shared in part: which of their tokens the tag speaks of is not known here.
        """
        keys = parent.ordered_keys
        if keys is None:
            if not parent.children:
                return None
            keys = parent.ordered_keys = sorted(parent.children)
        position = bisect_left(keys, tokens)
        best, best_length = None, 0
        for neighbour in keys[max(position - 1, 0) : position + 1]:
            length = common_prefix_length(neighbour, tokens)
            if length > best_length and is_plain(neighbour):
                best, best_length = parent.children[neighbour], length
        return (best, best_length) if best else None

    def __iter__(self) -> Iterator[CachedBlock]:
        """All nodes, parents first, roots not among them."""
        for root in self.roots.values():
            yield from self.behind(root)

    def behind(self, node: CachedBlock) -> Iterator[CachedBlock]:
        """All nodes behind `node`, parents first, itself not among them."""
        stack = list(node.children.values())
        while stack:
            current = stack.pop()
            yield current
            stack.extend(current.children.values())
