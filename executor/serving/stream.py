"""One request's events, from the executor's responses to whoever sends them on.

```
responses ─► OutputState.take ─► pending events ─► async for event in stream ─► gRPC, HTTP, terminal
             detokenize,          deltas of an      a slow reader finds them joined
             stop strings         output are joined
```
All of it lives on one asyncio loop; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from batch_manager.request import FinishReason
from executor.api.errors import RequestError
from executor.api.response import Result, Usage
from executor.serving.events import Accepted, Delta, Event, Finished, StopMatch, TokenLogProb
from executor.serving.request_record import RequestRecord
from executor.text import IncrementalDecoder, TextStream


class OutputState:
    """One output of a request: its text so far, and whether it has ended."""

    __slots__ = ("_decoder", "_end_ids", "_held", "_num_tokens", "_prompt_tokens", "_stops", "_streaming", "index")

    def __init__(
        self,
        index: int,
        decoder: IncrementalDecoder | None,
        stops: TextStream | None,
        *,
        end_ids: frozenset[int],
        prompt_tokens: int,
        streaming: bool,
    ) -> None:
        """Begin an output.

        Args:
            index: which of the request's outputs.
            decoder: turns its tokens into text, where there is a tokenizer and no stop string.
            stops: the same, and looks for stop strings.
            end_ids: the model's end tokens, unless the request ignores them.
            prompt_tokens: for the usage.
            streaming: whether deltas are sent as they come.
        """
        self.index = index
        self._decoder = decoder
        self._stops = stops
        self._end_ids = end_ids
        self._prompt_tokens = prompt_tokens
        self._streaming = streaming
        self._num_tokens = 0
        self._held: Delta | None = None

    def take(self, result: Result) -> tuple[Delta | None, Finished | None]:
        """Turn the executor's news into events. `Finished` ends the output, whether the executor ended it or a stop
        string did. Runs once for each token that is streamed, and is written to be fast."""
        reason = result.finish_reasons[0]
        token_ids = result.output_token_ids[0]
        match: StopMatch | None = None
        if reason is FinishReason.END_ID or reason is FinishReason.STOP_WORDS:
            last = token_ids[-1]
            if last in self._end_ids:
                reason, match, token_ids = FinishReason.END_ID, StopMatch(end_id=last), token_ids[:-1]
            else:
                match = StopMatch(stop_token_id=last)

        text = ""
        if self._decoder is not None:
            text = self._decoder.push(token_ids)
            if reason is not FinishReason.NOT_FINISHED:
                text += self._decoder.finish()
        elif self._stops is not None:
            text, num_kept, stop_string = _push_until_stop(self._stops, token_ids)
            if stop_string is not None:
                reason, match = FinishReason.STOP_WORDS, StopMatch(stop_string=stop_string)
                token_ids = token_ids[:num_kept]
            elif reason is not FinishReason.NOT_FINISHED:
                text += self._stops.finish().text
        self._num_tokens += len(token_ids)

        log_probs = [] if result.log_probs is None else _log_probs(result, len(token_ids))
        gained = Delta(self.index, text, token_ids, log_probs)
        delta: Delta | None = gained
        if not self._streaming:
            delta = self._held_back(gained, reason)
        elif not token_ids and not text:
            delta = None
        if reason is FinishReason.NOT_FINISHED:
            return delta, None
        usage = Usage(self._prompt_tokens, self._num_tokens, result.usage.reused_tokens)
        # A stop string may have ended here what the executor thinks goes on elsewhere.
        goes_on = result.context_phase_params if reason is FinishReason.LENGTH else None
        return delta, Finished(self.index, reason, match, usage, tuple(result.prompt_log_probs or ()), goes_on)

    def _held_back(self, delta: Delta, reason: FinishReason) -> Delta | None:
        """Everything so far when the output has ended, nothing before."""
        if self._held is None:
            self._held = delta
        else:
            self._held.absorb(delta)
        return None if reason is FinishReason.NOT_FINISHED else self._held


def _push_until_stop(stops: TextStream, token_ids: list[int]) -> tuple[str, int, str | None]:
    """New text, how many of the tokens it took, and the stop string that ended it."""
    text = ""
    for num_pushed, token_id in enumerate(token_ids, 1):
        delta = stops.push([token_id])
        text += delta.text
        if delta.stopped is not None:
            return text, num_pushed, delta.stopped
    return text, len(token_ids), None


def _log_probs(result: Result, count: int) -> list[TokenLogProb]:
    log_probs = [] if result.log_probs is None else result.log_probs[0][:count]
    if result.top_log_probs is None:
        return [TokenLogProb(log_prob) for log_prob in log_probs]
    return [TokenLogProb(log_prob, tuple(top)) for log_prob, top in zip(log_probs, result.top_log_probs, strict=False)]


class GenerationStream:
    """A live request's events. Iterate it with `async for`, inside `with`: leaving cancels what has not ended.

    Raises from the iteration the `RequestError` that ended the request, if one did.
    """

    def __init__(self, accepted: Accepted, record: RequestRecord, close: Callable[[GenerationStream], None]) -> None:
        self.accepted = accepted
        self.record = record
        self.num_open_outputs = len(accepted.executor_request_ids)
        self.error: RequestError | None = None
        self.busy_since: float | None = None
        """On the loop's clock, when the reader took the event that it is still sending; `None` while it waits."""
        self._reader: asyncio.Task[object] | None = None
        self._interruption: RequestError | None = None
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Event] = deque([accepted])
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Add an event, joining it with a delta of the same output that still waits."""
        if type(event) is Delta and self._pending:
            last = self._pending[-1]
            if type(last) is Delta and last.output_index == event.output_index:
                last.absorb(event)
                return
        elif type(event) is Finished:
            self.num_open_outputs -= 1
            self.record.finish_reasons.append(event.finish_reason)
            self.record.completion_tokens += event.usage.completion_tokens
            self.record.reused_tokens = max(self.record.reused_tokens, event.usage.reused_tokens)
        self._pending.append(event)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after the events that wait."""
        self.error = error
        self.num_open_outputs = 0
        self._wake()

    def interrupt(self, error: RequestError) -> None:
        """End the stream with an error now, though its reader is still busy with an event."""
        self._pending.clear()
        self.fail(error)
        if self._reader is not None:
            self._interruption = error
            self._reader.cancel()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> Event:
        self.busy_since = None
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self.num_open_outputs == 0:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        self.busy_since = self._loop.time()
        return self._pending.popleft()

    def __enter__(self) -> GenerationStream:
        self._reader = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.busy_since = None
        self._close(self)
        if self._interruption is not None and self._reader is not None and isinstance(value, asyncio.CancelledError):
            self._reader.uncancel()
            raise self._interruption from None  # the cancellation only served to end what the reader was waiting for
