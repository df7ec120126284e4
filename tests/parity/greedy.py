"""Greedy decoding on a bare engine: all prompts at once, in chunks within a token budget, no scheduler involved."""

from __future__ import annotations

from collections.abc import Sequence

from batch_manager.plan import IterationPlan, Phase, ScheduledRequest
from batch_manager.request import Request
from executor.engines.interface import Engine
from executor.model_runner import ModelRunner


def greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, *, min_rows_per_sequence: int = 1
) -> list[list[int]]:
    """Generate exactly `num_tokens` tokens for each prompt, whatever they are (an end id does not end it)."""
    runner = ModelRunner(engine, min_rows_per_sequence)
    requests = [Request(index, prompt, num_tokens) for index, prompt in enumerate(prompts)]
    num_blocks = 0
    for request in requests:
        needed = -(-request.max_num_tokens // engine.spec.tokens_per_block)
        request.block_ids = list(range(num_blocks, num_blocks + needed))
        num_blocks += needed
    if num_blocks > engine.num_blocks:
        raise ValueError(f"{len(prompts)} prompts need {num_blocks} blocks, the engine has {engine.num_blocks}")
    while plan := _next_plan(requests, engine.spec.max_num_tokens, min_rows_per_sequence):
        step = runner.submit(plan).wait()
        for entry, rows in zip(plan.scheduled, step.rows, strict=True):
            entry.request.num_computed_tokens += entry.num_scheduled_tokens
            if entry.samples:
                entry.request.token_ids.append(int(step.logits[rows][-1].argmax()))
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def _next_plan(requests: Sequence[Request], max_num_tokens: int, min_rows_per_sequence: int) -> IterationPlan | None:
    """First come first served within the budget; `None` when every request has its tokens."""
    scheduled: list[ScheduledRequest] = []
    budget = max_num_tokens
    for request in requests:
        if request.num_generated_tokens == request.max_new_tokens or budget < min_rows_per_sequence:
            continue
        start = request.num_computed_tokens
        missing = request.num_tokens_with_spec - start
        num_rows = min(missing, budget)
        num_extra_rows = max(0, min_rows_per_sequence - num_rows)
        budget -= num_rows + num_extra_rows
        scheduled.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_scheduled_tokens=num_rows,
                num_replayed_tokens=min(start, num_extra_rows),
                num_draft_tokens=0,
                num_tokens_with_spec=request.num_tokens_with_spec,
                num_reused_tokens=0,
                samples=num_rows == missing,
                phase=Phase.GENERATION if request.num_generated_tokens else Phase.CONTEXT,
            )
        )
    if not scheduled:
        return None
    return IterationPlan(0, scheduled, max_num_tokens - budget, copies=[], paused=[], timed_out=[])
