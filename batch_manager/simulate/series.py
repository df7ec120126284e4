"""A run over time in a bounded number of points, however long it is."""

from __future__ import annotations

from collections.abc import Sequence

from batch_manager.kv import KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import IterationPlan, Phase, Progress
from batch_manager.trace.observed import Observer

MAX_POINTS = 512


class Point:
    """What happened within one interval; maxima where not said otherwise."""

    __slots__ = (
        "num_context_rows",
        "num_generation_rows",
        "num_iterations",
        "num_output_tokens",
        "num_pauses",
        "num_running",
        "num_used_blocks",
        "num_waiting",
    )

    def __init__(self) -> None:
        self.num_iterations = 0
        """Sum, as are the next four."""
        self.num_context_rows = 0
        self.num_generation_rows = 0
        self.num_output_tokens = 0
        self.num_pauses = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_used_blocks = 0

    def include(self, other: Point) -> None:
        self.num_iterations += other.num_iterations
        self.num_context_rows += other.num_context_rows
        self.num_generation_rows += other.num_generation_rows
        self.num_output_tokens += other.num_output_tokens
        self.num_pauses += other.num_pauses
        self.num_running = max(self.num_running, other.num_running)
        self.num_waiting = max(self.num_waiting, other.num_waiting)
        self.num_used_blocks = max(self.num_used_blocks, other.num_used_blocks)


class RunSeries(Observer):
    """Points of equal width; when there are too many, each two become one of twice the width."""

    def __init__(self, width: float = 0.1) -> None:
        """`width`: seconds, to begin with."""
        self.width = width
        self.begin: float | None = None
        """Time of the first iteration; point i covers `[begin + i * width, begin + (i + 1) * width)`."""
        self.points: list[Point] = []
        self._manager: BatchManager | None = None
        self._kv: KvCacheManager | None = None

    def on_attach(self, manager: BatchManager, kv: KvCacheManager | None) -> None:
        self._manager, self._kv = manager, kv

    def _point(self, now: float) -> Point:
        if self.begin is None:
            self.begin = now
        while (index := int((now - self.begin) / self.width)) >= MAX_POINTS:
            self._halve()
        while len(self.points) <= index:
            self.points.append(Point())
        return self.points[index]

    def _halve(self) -> None:
        for left, right in zip(self.points[::2], self.points[1::2], strict=False):
            left.include(right)
        self.points = self.points[::2]
        self.width *= 2

    def on_schedule(self, plan: IterationPlan, now: float) -> None:
        assert self._manager is not None
        point = self._point(now)
        point.num_running = max(point.num_running, self._manager.num_running)
        point.num_waiting = max(point.num_waiting, self._manager.num_waiting)
        point.num_pauses += len(plan.paused)
        if plan.is_empty:
            return
        context_rows = 0
        for entry in plan.scheduled:
            if entry.phase is not Phase.CONTEXT:
                break  # contexts come first
            context_rows += entry.num_rows
        point.num_iterations += 1
        point.num_context_rows += context_rows
        point.num_generation_rows += plan.num_tokens - context_rows
        if self._kv is not None:
            point.num_used_blocks = max(point.num_used_blocks, self._kv.num_blocks - self._kv.num_free_blocks)

    def on_update(
        self,
        plan: IterationPlan,  # noqa: ARG002
        sampled: Sequence[Sequence[int]],  # noqa: ARG002
        progress: list[Progress],
        now: float,
    ) -> None:
        self._point(now).num_output_tokens += sum(len(made.new_token_ids) for made in progress)
