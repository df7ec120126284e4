"""What devices that share matrices exchange: two operators of our own domain, and where they stand.

`AllReduce(x)` is the sum of every device's `x`; `AllGather(x)` has every device's `x` one behind the other along the
first axis. Attribute `ranks`: who takes part, in order. On one device neither is written.
"""

from __future__ import annotations

from engine_build.network.graph import GraphBuilder
from engine_build.network.paged_attention import DOMAIN
from engine_build.parallel import Rank

ALL_REDUCE = "AllReduce"
ALL_GATHER = "AllGather"


class Collectives:
    """Writes exchanges between the devices of `rank`'s stage."""

    def __init__(self, graph: GraphBuilder, rank: Rank) -> None:
        self._graph = graph
        self._rank = rank

    def add_up(self, value: str, name: str) -> str:
        """The sum of `value` over the devices."""
        return self._graph.node(ALL_REDUCE, [value], name, domain=DOMAIN, ranks=self._rank.tp_group)

    def gather(self, value: str, columns: int, name: str) -> str:
        """`[S, columns]` on every device -> `[S, columns * tp_size]`, as it is on one device."""
        if self._rank.tp_size == 1:
            return value
        graph, size = self._graph, self._rank.tp_size
        stacked = graph.node(ALL_GATHER, [value], f"{name}.stacked", domain=DOMAIN, ranks=self._rank.tp_group)
        by_device = graph.reshape(stacked, [size, -1, columns], f"{name}.by_device")
        by_row = graph.node("Transpose", [by_device], f"{name}.by_row", perm=[1, 0, 2])
        return graph.reshape(by_row, [-1, size * columns], name)
