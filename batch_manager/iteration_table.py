"""The iteration table: one row for each request of each iteration."""

from __future__ import annotations

from typing import NamedTuple

from batch_manager.kv import num_held
from batch_manager.plan import IterationPlan, Phase


class IterationRow(NamedTuple):
    iteration: int
    request: int
    """Request id."""
    phase: Phase
    num_computed_tokens: int
    """Before the iteration."""
    num_tokens_with_spec: int
    """Tokens whose keys and values should exist: prompt, generated, drafts."""
    reused_tokens: int
    """Found in the cache when the request was (re)started."""
    num_scheduled_tokens: int
    blocks: int
    """Entries of the request's block table in this iteration."""


def iteration_rows(plan: IterationPlan) -> list[IterationRow]:
    """The rows of an iteration. Ask before `update`, which takes the blocks of finished requests back."""
    return [
        IterationRow(
            plan.iteration,
            entry.request.request_id,
            entry.phase,
            entry.start,
            entry.num_tokens_with_spec,
            entry.num_reused_tokens,
            entry.num_scheduled_tokens,
            num_held(entry.request.block_ids),
        )
        for entry in plan.scheduled
    ]
