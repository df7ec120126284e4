"""What one iteration computes: the only thing the executor needs to know from the scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from batch_manager.request import FinishReason, Request


class Phase(StrEnum):
    """A name for where a request's work in this iteration comes from (for people; nothing branches on it)."""

    CONTEXT = "context"
    GENERATION = "generation"


class ScheduledRequest(NamedTuple):
    """One request's part of an iteration.

    ```
    positions   0 ........... start-replayed .. start ................... start+num_scheduled_tokens
                in the pool   |  fed again    | computed in this step    |
                                                        last num_draft_tokens of them are drafts
    ```
    """

    request: Request
    start: int
    """First position computed in this iteration (`num_computed_tokens` before it)."""
    num_scheduled_tokens: int
    num_replayed_tokens: int
    """Rows before `start` that are fed again so that the sequence has at least `min_rows_per_sequence` rows."""
    num_draft_tokens: int
    num_tokens_with_spec: int
    num_reused_tokens: int
    samples: bool
    """Whether logits are wanted: of the last row, and with drafts of the last `1 + num_draft_tokens` rows."""
    phase: Phase

    @property
    def num_rows(self) -> int:
        """Query rows the engine sees for this request."""
        return self.num_scheduled_tokens + self.num_replayed_tokens


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` positions of block `source` to block `target` before the iteration computes."""

    source: int
    target: int
    num_tokens: int


class IterationPlan(NamedTuple):
    """One forward pass. Context requests come first, then generation requests, packed without padding."""

    iteration: int
    scheduled: list[ScheduledRequest]
    num_tokens: int
    """Rows of the forward pass, replayed rows included: at most `max_num_tokens`."""
    copies: list[BlockCopy]
    """To be made before anything is computed; none in an empty plan."""
    paused: list[Request]
    """Lost their blocks in this `schedule()`."""
    timed_out: list[Request]
    """Ended with `TIMED_OUT` in this `schedule()`; they are finished and hold nothing."""

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


class Progress(NamedTuple):
    """What an iteration did for one request, returned by `BatchManager.update`."""

    request: Request
    new_token_ids: list[int]
    """Tokens accepted in this iteration, those after a stop already trimmed."""
    finish_reason: FinishReason
    num_accepted_draft_tokens: int
