"""How the BatchManager decides: limits and policies, validated once, immutable afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from batch_manager.errors import InvalidConfigError


class CapacitySchedulerPolicy(IntEnum):
    """Who may hold KV blocks. Names and the first three numbers are those of TensorRT-LLM's executor."""

    MAX_UTILIZATION = 0
    """Admit what fits for one step; when blocks run out, pause the last started request and recompute it later."""
    GUARANTEED_NO_EVICT = 1
    """Admit only what can run to completion: an admitted request is never paused."""
    STATIC_BATCH = 2
    """As `GUARANTEED_NO_EVICT`, but admit only when nothing runs."""
    MAX_REQUESTS = 3
    """Only the number of requests counts: for engines without a KV cache."""


class ContextChunkingPolicy(IntEnum):
    """How the tokens of an iteration are shared between prompts. Names and numbers of TensorRT-LLM's executor."""

    FIRST_COME_FIRST_SERVED = 0
    """Earlier prompts take all they can."""
    EQUAL_PROGRESS = 1
    """Every prompt advances by one chunk unit in turn."""


class WaitingQueuePolicy(StrEnum):
    """Which waiting request is looked at first."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"
    """The tenant that has been served the fewest tokens per weight."""
    DEADLINE = "deadline"
    """The earliest deadline; those without one come last."""


@dataclass(frozen=True, slots=True)
class BatchManagerConfig:
    """Limits and policies. Sizes are in tokens, requests or pages; times in seconds."""

    max_batch_size: int = 64
    """Sequences in one iteration."""
    max_num_tokens: int = 2048
    """Query rows in one iteration."""
    max_num_active: int | None = None
    """Requests that may hold KV blocks at once; `None`: `max_batch_size`."""
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    enable_chunked_context: bool = True
    """Whether a prompt may be computed in several iterations."""
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    chunk_unit_size: int = 1
    """Every chunk but a prompt's last is a multiple of it; engines whose kernels ask for whole blocks set
    `tokens_per_block`."""
    long_prompt_cap: int | None = None
    """At most so many tokens of one prompt in an iteration, as long as there is another request."""
    waiting_queue_policy: WaitingQueuePolicy = WaitingQueuePolicy.FCFS
    priority_ageing: float | None = 60.0
    """Seconds of waiting that make up for a whole step of priority (1.0); `None`: waiting never counts."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the fair queue; a tenant that is not named weighs 1."""
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    """Bounds of the queue: waiting requests, and the tokens they have to compute."""
    min_rows_per_sequence: int = 1
    """Query rows each scheduled sequence has at least; 2 is the deterministic mode."""
    max_steps_in_flight: int = 1
    """2: an iteration may be planned before the tokens of the one before it are known."""
    num_adapter_pages: int | None = None
    """Pages of the adapter (LoRA) cache; `None`: adapters are not limited."""
    max_pauses_per_request: int = 2
    """After so many pauses a request comes back only with its blocks to completion reserved."""
    enable_prefix_deferral: bool = True
    """Whether a request waits for the prefix that another one is computing just now."""

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size",
            "max_num_tokens",
            "max_num_active",
            "chunk_unit_size",
            "long_prompt_cap",
            "max_pauses_per_request",
        ):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("max_queued_requests", "max_queued_tokens", "num_adapter_pages"):
            _require_at_least(name, getattr(self, name), 0)
        if self.min_rows_per_sequence not in (1, 2):
            raise InvalidConfigError(f"min_rows_per_sequence must be 1 or 2, not {self.min_rows_per_sequence}")
        if self.max_steps_in_flight not in (1, 2):
            raise InvalidConfigError(f"max_steps_in_flight must be 1 or 2, not {self.max_steps_in_flight}")
        if self.priority_ageing is not None and not self.priority_ageing > 0:
            raise InvalidConfigError(f"priority_ageing must be above 0 seconds or None, not {self.priority_ageing}")
        if self.max_num_tokens < self.min_rows_per_sequence:
            raise InvalidConfigError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least "
                f"min_rows_per_sequence ({self.min_rows_per_sequence}): no sequence would fit an iteration"
            )
        if self.enable_chunked_context and self.chunk_unit_size > self.max_num_tokens:
            raise InvalidConfigError(
                f"chunk_unit_size ({self.chunk_unit_size}) must be at most max_num_tokens ({self.max_num_tokens}): "
                "no chunk would fit an iteration"
            )
        if self.long_prompt_cap is not None and self.long_prompt_cap < self.chunk_unit_size:
            raise InvalidConfigError(
                f"long_prompt_cap ({self.long_prompt_cap}) must be at least chunk_unit_size ({self.chunk_unit_size})"
            )
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise InvalidConfigError(f"tenant_weights[{tenant!r}] must be a finite number above 0, not {weight}")

    @property
    def num_active_limit(self) -> int:
        """Requests that may run at once: each of them has its rows in every iteration."""
        limit = self.max_batch_size if self.max_num_active is None else self.max_num_active
        return min(limit, self.max_batch_size, self.max_num_tokens // self.min_rows_per_sequence)


def _require_at_least(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise InvalidConfigError(f"{name} must be at least {minimum}, not {value}")
