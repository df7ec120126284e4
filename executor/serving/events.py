"""What a generation tells its client, in any protocol: accepted, deltas, finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from batch_manager.request import FinishReason
from executor.api.request import ContextPhaseParams
from executor.api.response import Usage


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended an output: exactly one field is set."""

    stop_string: str | None = None
    stop_token_id: int | None = None
    end_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """Log probability of a generated token, and of the most likely tokens in its place (most likely first)."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request passed all checks and is queued. Always the first event."""

    request_id: str
    prompt_tokens: int
    executor_request_ids: tuple[int, ...]
    """The executor's id of each output."""


@dataclass(slots=True)
class Delta:
    """What an output gained since its last delta.

    Text can lag behind token ids: a character that spans tokens comes whole, and text that may begin a stop string
    comes when that is decided.
    """

    output_index: int
    text: str
    token_ids: list[int]
    """Without the end token; a stop token is among them."""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    """One for each of `token_ids`, or none when they were not asked for."""

    def absorb(self, later: Delta) -> None:
        """Append the same output's next delta to this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.log_probs += later.log_probs


@dataclass(frozen=True, slots=True)
class Finished:
    """An output has ended; exactly one for each output of a request that does not fail."""

    output_index: int
    finish_reason: FinishReason
    stop_match: StopMatch | None
    """With `END_ID` and `STOP_WORDS`."""
    usage: Usage
    prompt_log_probs: tuple[float, ...] = ()
    """Of each prompt token but the first, where they were asked for."""
    context_phase_params: ContextPhaseParams | None = None
    """Of a context-only request that goes on elsewhere."""


Event = Accepted | Delta | Finished
