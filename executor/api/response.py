"""What comes back. Names follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from batch_manager.request import FinishReason
from executor.api.errors import RequestError


@dataclass(slots=True)
class TimingMetrics:
    """Points in time as durations on the monotonic clock, comparable with each other only."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()


@dataclass(slots=True)
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass(slots=True)
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far (not upstream's)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose K and V were found in the cache."""


@dataclass(slots=True)
class Result:
    """One step's news of a request, or all of it when it does not stream."""

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    """One list a beam (always one): new tokens when streaming, else prompt and output (see `OutputConfig`)."""
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    """Log probability of each generated token, one list a beam."""
    top_log_probs: list[list[tuple[int, float]]] | None = None
    """For each generated token the most likely (token, log probability) pairs (not upstream's)."""
    context_logits: NDArray[np.float32] | None = None
    generation_logits: NDArray[np.float32] | None = None
    """`[1, tokens, vocab]`, or `[1, new tokens, vocab]` when streaming."""
    encoder_output: None = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float = 0.0
    context_phase_params: None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    usage: Usage = field(default_factory=Usage)


class Response:
    """A `Result`, or the error that ended the request."""

    __slots__ = ("_result", "client_id", "error", "request_id")

    def __init__(
        self,
        request_id: int,
        result: Result | None = None,
        *,
        error: RequestError | None = None,
        client_id: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.error = error
        self._result = result

    def has_error(self) -> bool:
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """The error's text; raises `ValueError` where there is none, as upstream does."""
        if self.error is None:
            raise ValueError(f"request {self.request_id} has a result, not an error")
        return self.error.message

    @property
    def result(self) -> Result:
        """The result; raises the error where there is one."""
        if self._result is None:
            raise self.error if self.error is not None else ValueError("empty response")
        return self._result

    @property
    def is_final(self) -> bool:
        """Whether the request has ended with this response."""
        return self._result is None or self._result.is_final

    def __repr__(self) -> str:
        return f"Response({self.request_id}, {self._result if self.error is None else self.error!r})"
