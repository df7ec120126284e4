"""What comes back. Names follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batch_manager.request import FinishReason
from executor.api.decoding import SpeculativeDecodingFastLogitsInfo
from executor.api.errors import InvalidRequestError, RequestError
from executor.api.request import ContextPhaseParams
from executor.api.support import addition, never_set

_NO_DRAFT_MODEL = "draft models are not offered yet"


@dataclass(slots=True)
class TimingMetrics:
    """Points in time as durations on the monotonic clock, comparable with each other only; zero: not yet."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0
    """Bytes received from another instance."""


@dataclass(slots=True)
class KvCacheMetrics:
    """The blocks of the prompt: found in the cache (in full or in part), or taken anew."""

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
    """Iteration that first computed some of the request."""
    last_iter: int | None = None
    """Iteration that ended it; `None` before."""
    iter: int | None = None
    """Iteration of this result."""


@dataclass(slots=True)
class AdditionalOutput:
    name: str
    output: Any


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
    context_logits: NDArray[np.float32] | None = None
    """`[prompt tokens, vocab]`, the same array in every result of a sequence; `None` before the prompt is computed."""
    generation_logits: NDArray[np.float32] | None = None
    """`[1, tokens, vocab]`; when streaming `[tokens, 1, vocab]` of the tokens in this result."""
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = never_set(None, _NO_DRAFT_MODEL)
    encoder_output: Any = never_set(None, "only decoder-only models are offered")
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    """Iterations in which the sequence got tokens, this one included."""
    avg_decoded_tokens_per_iter: float = 0.0
    context_phase_params: ContextPhaseParams | None = None
    """Of a context-only request that is not finished with its first token: what a generation-only request with the
    same prompt goes on with."""
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[AdditionalOutput] = never_set(why="plans have no output but logits", default_factory=list)
    _: KW_ONLY
    top_log_probs: list[list[tuple[int, float]]] | None = addition(None)
    """For each generated token the most likely (token, log probability) pairs."""
    prompt_log_probs: list[float] | None = addition(None)
    """Log probability of each prompt token but the first, given those before it."""
    usage: Usage = addition(default_factory=Usage)


class Response:
    """A `Result`, or the error that ended the request."""

    __slots__ = ("_result", "client_id", "error", "request_id")

    def __init__(
        self,
        request_id: int,
        result: Result | str | None = None,
        client_id: int | None = None,
        *,
        error_msg: str | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Make a response.

        Args:
            request_id: whose.
            result: the result, or, as upstream's constructor takes it, the text of an error.
            client_id: the request's `client_id`.
            error_msg: the text of an error.
            error: an error, in the executor's own responses.
        """
        text = result if isinstance(result, str) else error_msg
        self.request_id = request_id
        self.client_id = client_id
        self.error = error if text is None else InvalidRequestError(text)
        self._result = result if isinstance(result, Result) else None
        if (self.error is None) == (self._result is None):
            raise ValueError("a response has a result or an error: exactly one of them")

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
            assert self.error is not None
            raise self.error
        return self._result

    @property
    def is_final(self) -> bool:
        """Whether the request has ended with this response."""
        return self._result is None or self._result.is_final

    def clear_context_logits(self) -> None:
        """Let go of the context logits, which may be large."""
        if self._result is not None:
            self._result.context_logits = None

    def clear_generation_logits(self) -> None:
        """Let go of the generation logits, which may be large."""
        if self._result is not None:
            self._result.generation_logits = None

    def __repr__(self) -> str:
        return f"Response({self.request_id}, {self._result if self.error is None else self.error!r})"
