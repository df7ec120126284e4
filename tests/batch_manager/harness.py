"""Drives a BatchManager with a made-up model: one token for each sampled row, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    IterationPlan,
    KvCacheConfig,
    KvCacheManager,
    Request,
    ScheduledRequest,
    WaitCode,
)

TokenSource = Callable[[ScheduledRequest], Sequence[int]]


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def next_token(entry: ScheduledRequest) -> list[int]:
    """One token that depends on the request and its length, never a stop token of these tests (below 1000)."""
    return [1000 + (entry.request.request_id * 31 + len(entry.request.token_ids)) % 1000] if entry.samples else []


class Harness:
    """A BatchManager with a pool of `num_blocks`, and counters."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        tokens_per_block: int = 10,
        enable_block_reuse: bool = False,
        tokens: TokenSource = next_token,
        **config: object,
    ) -> None:
        self.kv = KvCacheManager(
            KvCacheConfig(
                num_blocks=num_blocks, tokens_per_block=tokens_per_block, enable_block_reuse=enable_block_reuse
            )
        )
        self.clock = VirtualClock()
        self.manager = BatchManager(BatchManagerConfig(**config), self.kv, self.clock)  # type: ignore[arg-type]
        self.tokens = tokens
        self.num_iterations = 0
        self.step_seconds = 1.0

    def add(
        self,
        request_id: int,
        prompt: int | Sequence[int],
        max_new_tokens: int,
        held_for: WaitCode | None = None,
        **fields: object,
    ) -> Request:
        """`prompt`: token ids, or how many (then different for every request)."""
        if isinstance(prompt, int):
            prompt = [10_000 * (request_id + 1) + position for position in range(prompt)]
        fields.setdefault("arrival_time", self.clock.now)
        request = Request(request_id, prompt, max_new_tokens, **fields)  # type: ignore[arg-type]
        self.manager.add_request(request, held_for)
        return request

    def step(self) -> IterationPlan:
        """One iteration from plan to update."""
        plan = self.manager.schedule()
        if not plan.is_empty:
            self.finish(plan)
        return plan

    def finish(self, plan: IterationPlan) -> None:
        self.num_iterations += 1
        self.clock.now += self.step_seconds
        self.manager.update(plan, [self.tokens(entry) for entry in plan.scheduled])

    def run(self, limit: int = 100_000) -> list[IterationPlan]:
        """Until there is no work."""
        plans = []
        while self.manager.has_work:
            plan = self.step()
            assert not plan.is_empty, "there is work, but nothing can run"
            plans.append(plan)
            assert len(plans) <= limit
        return plans


def sizes(plan: IterationPlan) -> dict[int, int]:
    """Tokens by request id."""
    return {entry.request.request_id: entry.num_scheduled_tokens for entry in plan.scheduled}


def ids(plans: Iterable[IterationPlan]) -> list[list[int]]:
    """Request ids by iteration."""
    return [sorted(sizes(plan)) for plan in plans]
