"""What a request cost, told after it has ended. Not in TensorRT-LLM's bindings."""

from __future__ import annotations

from dataclasses import dataclass

from batch_manager import FinishReason, Pause


@dataclass(frozen=True, slots=True)
class SequenceReceipt:
    """What one of a request's outputs cost. Tokens of the KV cache are positions whose keys and values were at hand."""

    sequence_index: int
    finish_reason: FinishReason
    """`CANCELLED` for one that an error ended, too."""
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    """Positions computed, every recomputation counted; rejected drafts are not."""
    num_reused_tokens: int
    """Positions found in the cache, over all (re)starts."""
    num_recomputed_tokens: int
    """Of the computed ones, those that were lost in a pause and computed again."""
    num_transferred_tokens: int
    """Positions that another instance had computed and sent."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    pauses: tuple[Pause, ...]
    """Each time it lost its blocks: when, why, and to which sequence, by the scheduler's id."""
    block_seconds: float
    """KV blocks held, times the seconds for which they were."""
    queue_seconds: float
    """From arrival until it first ran, or until it ended without having run."""
    paused_seconds: float
    """Without blocks, between a pause and the restart, or the end."""
    total_seconds: float
    """From arrival to end."""


@dataclass(frozen=True, slots=True)
class RequestReceipt:
    """What a request cost, output by output."""

    request_id: int
    client_id: int | None
    sequences: tuple[SequenceReceipt, ...]
    """By `sequence_index`."""
    error: str
    """Why it failed; empty where it did not."""
