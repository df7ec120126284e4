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
from typing import NamedTuple

from batch_manager.kv.block import BlockKey, CachedBlock
from batch_manager.request import Request


class Namespace(NamedTuple):
    """What must be equal before any token is compared."""

    adapter_id: int | None
    cache_salt: int | None


def namespace_of(request: Request) -> Namespace:
    return Namespace(request.adapter_id, request.cache_salt)


def common_prefix_length(left: BlockKey, right: BlockKey) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


class RadixTree:
    """Nodes and edges only: knows nothing of pools, holds or time."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, CachedBlock] = {}
        self.num_nodes = 0

    def root(self, namespace: Namespace) -> CachedBlock:
        """The namespace's root, made when there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = CachedBlock((), None, 0)
            root.num_holds = 1  # a root is never evicted: no hold counted on it can be the last one
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
        detached = list(self._below(node))
        for gone in detached:
            gone.is_attached = False
        self.num_nodes -= len(detached)
        return detached

    def drop_root_if_empty(self, namespace: Namespace) -> None:
        """Salts come and go by the thousand: a root without children is not worth its memory."""
        root = self.roots.get(namespace)
        if root is not None and not root.children and root.num_holds == 1:
            root.is_attached = False
            del self.roots[namespace]

    def best_partial_child(self, parent: CachedBlock, tokens: BlockKey) -> tuple[CachedBlock, int] | None:
        """The child that shares the longest beginning with `tokens`, and how many tokens that is; None if none does.

        In lexicographic order that child is a neighbour of `tokens`, so the cost is logarithmic in the children. Blocks
        with tags (content that is not text) are never shared in part.
        """
        keys = parent.ordered_keys
        if keys is None:
            if not parent.children:
                return None
            keys = parent.ordered_keys = sorted(parent.children)
        position = bisect_left(keys, tokens)
        best: tuple[CachedBlock, int] | None = None
        for neighbour in keys[max(position - 1, 0) : position + 1]:
            length = common_prefix_length(neighbour, tokens)
            if length > (best[1] if best else 0) and type(neighbour[-1]) is int:
                best = parent.children[neighbour], length
        return best

    def __iter__(self) -> Iterator[CachedBlock]:
        """All nodes, parents first, roots not among them."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from self._below(child)

    def _below(self, node: CachedBlock) -> Iterator[CachedBlock]:
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack.extend(current.children.values())
