"""Takes over what an iteration sampled: tokens are appended, rejected drafts taken back, full blocks stored, finished
requests ended."""

from __future__ import annotations

from collections.abc import Sequence

from batch_manager.errors import InvalidSampledTokensError
from batch_manager.lifecycle import Lifecycle
from batch_manager.plan import IterationPlan, Progress, ScheduledRequest
from batch_manager.request import FinishReason, Request, RequestState
from batch_manager.speculation import SpeculationStats
from batch_manager.stop import append_until_stop, check_stop

NOT_FINISHED = FinishReason.NOT_FINISHED
RUNNING = RequestState.RUNNING
FINISHED = RequestState.FINISHED
new_tuple = tuple.__new__


def commit(
    plan: IterationPlan, sampled: Sequence[Sequence[int]], life: Lifecycle, speculation: SpeculationStats
) -> list[Progress]:
    """Apply an iteration's results; see `BatchManager.update`.

    The loop runs once for each scheduled sequence, and is written to be fast.
    """
    check_counts(plan, sampled)
    store = life.blocks.store
    progress: list[Progress] = []
    ended: list[tuple[Request, FinishReason, int]] = []
    for entry, tokens in zip(plan.scheduled, sampled, strict=True):
        request, start, size, _, num_drafts, _, _, samples, _ = entry
        state = request.state
        if state is FINISHED:
            continue
        num_accepted = 0
        reason = NOT_FINISHED
        new_tokens: list[int] = []
        if num_drafts:
            num_accepted = len(tokens) - 1
            take_back_drafts(request, num_drafts, num_accepted, speculation)
            new_tokens, reason = append_until_stop(request, tokens)
            size = min(size - num_drafts + num_accepted, len(request.token_ids) - start)
        end = start + size
        if state is RUNNING:
            if end >= request.next_store:
                store(request, end)
            if start < request.context_end:
                advance_context(request, end, life)
        if not samples:
            continue
        if not num_drafts:
            token = tokens[0]
            new_tokens = [token]
            token_ids = request.token_ids
            token_ids.append(token)
            if token in request.stop_ids or len(token_ids) >= request.num_tokens_unchecked:
                reason = check_stop(request)
        if state is not RUNNING:
            life.waiting.num_tokens += len(new_tokens)
        if reason is not NOT_FINISHED:
            ended.append((request, reason, end))
        progress.append(new_tuple(Progress, (request, new_tokens, reason, num_accepted)))
    for request, reason, end in ended:
        if request.state is RUNNING:
            life.blocks.store_last(request, end)
        life.finish(request, reason)
    if ended:
        life.sweep()
    return progress


def check_counts(plan: IterationPlan, sampled: Sequence[Sequence[int]]) -> None:
    """Raises `InvalidSampledTokensError` unless there are as many tokens for each request as can have been sampled.

    Of requests that ended meanwhile nothing is taken over, so nothing is expected.
    """
    if len(sampled) != len(plan.scheduled):
        raise InvalidSampledTokensError(
            f"iteration {plan.iteration} has {len(plan.scheduled)} requests, but tokens came for {len(sampled)}"
        )
    counts = list(map(len, sampled))
    if counts == [entry[SAMPLES] for entry in plan.scheduled]:
        return
    for entry, count in zip(plan.scheduled, counts, strict=True):
        least = int(entry.samples)
        most = least + entry.num_draft_tokens
        if not least <= count <= most and not entry.request.is_finished:
            raise InvalidSampledTokensError(
                f"iteration {plan.iteration}: {count} tokens came for request {entry.request.request_id}, "
                f"expected {least}" + (f" to {most}" if most > least else "")
            )


SAMPLES = ScheduledRequest._fields.index("samples")


def take_back_drafts(request: Request, num_drafts: int, num_accepted: int, speculation: SpeculationStats) -> None:
    """Drafts were verified: count them, and forget those that were rejected."""
    speculation.observe(num_drafts, num_accepted)
    request.receipt.num_draft_tokens += num_drafts
    request.receipt.num_accepted_draft_tokens += num_accepted
    request.draft_token_ids.clear()
    request.num_drafts_in_flight = 0
    request.num_tokens += num_accepted
    num_rejected = num_drafts - num_accepted
    if request.state is RUNNING:
        request.num_computed_tokens -= num_rejected
    else:
        request.receipt.take_back(num_rejected)


def advance_context(request: Request, end: int, life: Lifecycle) -> None:
    """A chunk of a context was computed: followers of its prefix may go on."""
    if end >= request.context_end:
        woken = life.deferral.end(request)
    else:
        woken = life.deferral.advance(request, end)
    if woken:
        life.wake(woken)
