"""Attention windows under the whole BatchManager: what is reserved, and that it is enough."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    IterationPlan,
    KvCacheConfig,
    KvCacheManager,
    Request,
    ScheduledRequest,
)


@given(
    seed=st.integers(0, 2**32),
    window=st.integers(1, 40),
    tokens_per_block=st.sampled_from([1, 4, 8]),
    steps_in_flight=st.integers(1, 2),
    min_rows=st.integers(1, 2),
    enable_block_reuse=st.booleans(),
    max_drafts=st.sampled_from([0, 5]),
)
def test_blocks_reserved_for_a_window_suffice_whatever_runs_beside(
    seed: int,
    window: int,
    tokens_per_block: int,
    steps_in_flight: int,
    min_rows: int,
    enable_block_reuse: bool,
    max_drafts: int,
) -> None:
    """Under `GUARANTEED_NO_EVICT` nobody is ever paused, and every request comes to its end."""
    source = random.Random(seed)
    kv = KvCacheManager(
        KvCacheConfig(
            -(-200 // tokens_per_block),
            tokens_per_block,
            attention_window=window,
            enable_block_reuse=enable_block_reuse,
        )
    )
    manager = BatchManager(
        BatchManagerConfig(
            max_batch_size=8,
            max_num_tokens=32,
            capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            max_steps_in_flight=steps_in_flight,
            min_rows_per_sequence=min_rows,
        ),
        kv,
    )
    beginning = [source.randrange(10, 14) for _ in range(60)]
    requests = [
        Request(
            number,
            beginning[: source.randint(0, 60)] + [source.randrange(10, 14) for _ in range(source.randint(1, 20))],
            source.randint(1, 120),
        )
        for number in range(1, 13)
    ]
    for request in requests:
        manager.add_request(request)

    in_flight: deque[IterationPlan] = deque()
    for _ in range(6_000):
        if not manager.has_work:
            break
        if len(in_flight) < steps_in_flight:
            plan = manager.schedule()
            if not plan.is_empty:
                in_flight.append(plan)
                continue
            assert in_flight, "nothing runs, and nothing can be scheduled"
        step = in_flight.popleft()
        manager.update(step, [_drawn(entry, source) for entry in step.scheduled])
        kv.check_invariants()
        if max_drafts and not in_flight:
            for entry in step.scheduled:
                if entry.samples and not entry.request.is_finished:
                    entry.request.draft_token_ids = [source.randrange(10, 14) for _ in range(max_drafts)]
    assert not manager.has_work
    assert [request.num_pauses for request in requests] == [0] * len(requests)
    assert kv.num_free_blocks == kv.num_blocks


def _drawn(entry: ScheduledRequest, source: random.Random) -> list[int]:
    """Some of the drafts are accepted, then comes a token of our own."""
    drafts = entry.request.draft_token_ids[: source.randint(0, entry.num_draft_tokens)]
    return [*drafts, source.randrange(10, 14)] if entry.samples else []
