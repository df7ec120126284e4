"""What became of a request, for logs, metrics and traces: told once, when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batch_manager.request import FinishReason
from executor.api.errors import RequestError


@dataclass(slots=True)
class RequestRecord:
    """A request's numbers. Times are seconds on the asyncio loop's clock, which is monotonic."""

    request_id: str
    tenant: str
    prompt_tokens: int
    num_outputs: int
    streaming: bool
    accepted_at: float
    trace_parent: str | None = None
    """W3C trace context that came with the request."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float = 0.0
    completion_tokens: int = 0
    reused_tokens: int = 0
    finish_reasons: list[FinishReason] = field(default_factory=list)
    """Of the outputs that ended, in that order."""
    error: RequestError | None = None
    """What ended the request instead."""

    @property
    def was_abandoned(self) -> bool:
        """Whether the client left before the end."""
        return self.error is None and len(self.finish_reasons) < self.num_outputs

    @property
    def outcome(self) -> str:
        """One word: the error's code, `ABANDONED`, or the (first) finish reason."""
        if self.error is not None:
            return str(self.error.code)
        return "ABANDONED" if self.was_abandoned else self.finish_reasons[0].name

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.accepted_at

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between tokens of an output, after its first; `None` for less than two."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        intervals = self.completion_tokens / self.num_outputs - 1
        return (self.last_token_at - self.first_token_at) / intervals if intervals > 0 else None


class RequestObserver(Protocol):
    """Hears of every request once, on the asyncio loop. Must be quick and must not raise."""

    def on_refused(self, request_id: str | None, error: RequestError) -> None:
        """A request was refused before it was queued."""
        ...

    def on_ended(self, record: RequestRecord) -> None:
        """A request that was queued has ended, one way or another."""
        ...


@dataclass(frozen=True, slots=True)
class Observers:
    """Several observers as one."""

    observers: Sequence[RequestObserver] = ()

    def on_refused(self, request_id: str | None, error: RequestError) -> None:
        for observer in self.observers:
            observer.on_refused(request_id, error)

    def on_ended(self, record: RequestRecord) -> None:
        for observer in self.observers:
            observer.on_ended(record)
