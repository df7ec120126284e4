"""The layer between every protocol and the Executor: requests in, typed events out.

```
                        executor's loop thread          |  asyncio loop
                                                        |  start(request): checks, tokenizes (long prompts on a
                        ◄───────────────────────────────┼─ thread of their own), enqueues
                        listener(responses) ── one ─────┼► deliver: each response to its output's stream
                        once an iteration    wake-up    |
```
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial

from executor.api.errors import (
    DuplicateRequestError,
    ExecutorShutDownError,
    QueueFullError,
    RequestError,
    UnsupportedFeatureError,
)
from executor.api.request import OutputConfig, Request
from executor.api.response import Response
from executor.serving.events import Accepted
from executor.serving.generation_request import GenerationRequest, Prompt
from executor.serving.interface import ServedExecutor
from executor.serving.prompt import num_characters, prompt_token_ids
from executor.serving.request_record import Observers, RequestObserver, RequestRecord
from executor.serving.stream import GenerationStream, OutputState
from executor.text import TextStream, Tokenizer

_logger = logging.getLogger(__name__)

_SEED_RANGE = 2**64

_REMEMBERED = 1000
"""Requests that ended whose ids are kept: as many as the executor keeps receipts of, unless it is told otherwise."""

_TOKENIZED_ON_LOOP = 2_000
"""Characters of a prompt that are tokenized on the loop itself: takes a millisecond or less, about ten times what
handing them to a thread does. Megabytes take seconds."""


class SlowReaderError(QueueFullError):
    """The client did not take its events for too long; its request was cancelled. The same request may succeed."""


class GenerationService:
    """Runs generations on an executor for any number of protocols.

    Make it on the asyncio loop that uses it; it belongs to that loop. Close it before the executor shuts down.
    """

    def __init__(
        self,
        executor: ServedExecutor,
        tokenizer: Tokenizer | None,
        *,
        end_ids: Iterable[int],
        default_max_tokens: int | None = None,
        slow_reader_seconds: float = 30.0,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        """Serve an executor.

        Args:
            executor: runs the requests.
            tokenizer: the engine directory's; `None` serves token ids only.
            end_ids: the model's end tokens; the first is the one the executor masks below `min_tokens`.
            default_max_tokens: of requests that name no `max_tokens`; as many as fit behind the prompt by default,
                and never more.
            slow_reader_seconds: a client that takes none of its waiting events for so long loses its request.
            observers: hear of every request once.
        """
        self.executor = executor
        self.tokenizer = tokenizer
        self.end_ids = tuple(end_ids)
        self.default_max_tokens = default_max_tokens
        self.slow_reader_seconds = slow_reader_seconds
        self._observer = Observers(observers)
        self.is_draining = False
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, GenerationStream] = {}
        self._outputs: dict[int, tuple[GenerationStream, OutputState]] = {}
        self._ended: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._watch = self._loop.create_task(self._watch_readers())

    @property
    def num_live_requests(self) -> int:
        return len(self._streams)

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Check, tokenize and queue a request.

        A long prompt is tokenized beside the loop; other requests go on meanwhile.

        Returns:
            Its events; use it in a `with` block, whose end cancels what has not ended.

        Raises:
            RequestError: of the kind that says what is wrong, with the field at fault; nothing is queued.
        """
        try:
            return await self._start(request)
        except RequestError as error:
            self._observer.on_refused(request.request_id, error)
            raise

    async def _start(self, request: GenerationRequest) -> GenerationStream:
        self._check_draining()
        request.validate()
        if request.stop_strings and self.tokenizer is None:
            raise UnsupportedFeatureError(
                "stop_strings is not offered: the engine directory has no tokenizer; use stop_token_ids",
                field="stop_strings",
            )
        request_id = uuid.uuid4().hex if request.request_id is None else request.request_id
        self._check_unused(request_id)
        token_ids = await self._token_ids(request.prompt)
        self._check_draining()  # again: it may have begun, and the id may have been taken, while a thread tokenized
        self._check_unused(request_id)
        executor_ids = self._enqueue(request, token_ids)

        record = RequestRecord(
            request_id,
            tenant=request.tenant,
            prompt_tokens=len(token_ids),
            num_outputs=len(executor_ids),
            streaming=request.streaming,
            accepted_at=self._loop.time(),
            trace_parent=request.trace_parent,
        )
        accepted = Accepted(request_id, len(token_ids), tuple(executor_ids))
        stream = GenerationStream(accepted, record, self._close_stream)
        for index, executor_id in enumerate(executor_ids):
            self._outputs[executor_id] = stream, self._output_state(request, index, len(token_ids))
        self._streams[request_id] = stream
        return stream

    def _check_draining(self) -> None:
        if self.is_draining:
            raise ExecutorShutDownError("the server is draining and takes no new requests")

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams:
            raise DuplicateRequestError(f"request_id {request_id!r} belongs to a live request", field="request_id")

    async def _token_ids(self, prompt: Prompt) -> list[int]:
        tokenize = partial(prompt_token_ids, self.tokenizer, prompt, self.executor.spec.max_input_len)
        if num_characters(prompt) <= _TOKENIZED_ON_LOOP:
            return tokenize()
        return await asyncio.to_thread(tokenize)

    def abort(self, request_id: str) -> bool:
        """Cancel a live request by its exact id; its open outputs finish with `CANCELLED`. False: no such request."""
        stream = self._streams.get(request_id)
        if stream is None or stream.num_open_outputs == 0:
            return False
        for executor_id in stream.accepted.executor_request_ids:
            if executor_id in self._outputs:
                self.executor.cancel_request(executor_id)
        return True

    def open_outputs(self, request_id: str) -> list[tuple[int, int]] | None:
        """(output index, executor's id) of a live request's outputs that have not ended; `None`: no such request."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        ids = stream.accepted.executor_request_ids
        return [(index, executor_id) for index, executor_id in enumerate(ids) if executor_id in self._outputs]

    def executor_ids_of_ended(self, request_id: str) -> tuple[int, ...] | None:
        """The executor's ids of the latest request of this id, by output index. `None`: it lives, never was, or is not
        among the last that ended."""
        return None if request_id in self._streams else self._ended.get(request_id)

    async def drain(self, seconds: float) -> None:
        """Take no new requests and wait for the live ones; after so many seconds cancel them."""
        self.is_draining = True
        deadline = self._loop.time() + seconds
        while self._streams and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)

    def close(self) -> None:
        """Cancel everything: open streams end with an error. The executor outlives it."""
        self.is_draining = True
        self._watch.cancel()
        for stream in list(self._streams.values()):
            if stream.num_open_outputs:
                stream.fail(ExecutorShutDownError("the server stopped before the request had ended"))
            self._close_stream(stream)

    # -- to the executor ----------------------------------------------------------------------------------------------

    def _enqueue(self, request: GenerationRequest, token_ids: list[int]) -> list[int]:
        """Queue one executor request for each output, so that each can end by itself; all or none."""
        executor_ids: list[int] = []
        try:
            for index in range(request.num_return_sequences):
                output = self._executor_request(request, token_ids, index)
                executor_ids.append(self.executor.enqueue_request(output, listener=self._on_responses))
        except BaseException:
            for executor_id in executor_ids:
                self.executor.cancel_request(executor_id)
            raise
        return executor_ids

    def _executor_request(self, request: GenerationRequest, token_ids: list[int], index: int) -> Request:
        sampling = request.sampling_config
        if sampling.seed is not None and index:
            sampling = dataclasses.replace(sampling, seed=(sampling.seed + index) % _SEED_RANGE)
        end_ids = () if request.ignore_eos else self.end_ids
        stop_token_ids = [*end_ids[1:], *request.stop_token_ids]
        return Request(
            token_ids,
            self._max_tokens(request, len(token_ids)),
            streaming=True,
            sampling_config=sampling,
            output_config=OutputConfig(
                return_log_probs=request.return_log_probs,
                num_top_log_probs=request.num_top_log_probs,
                return_prompt_log_probs=request.return_prompt_log_probs,
            ),
            end_id=end_ids[0] if end_ids else None,
            bad_words=[list(word) for word in request.bad_words] or None,
            stop_words=[[token_id] for token_id in stop_token_ids] or None,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt_id=request.cache_salt_id,
            allotted_time_ms=request.allotted_time_ms,
            guided_decoding_params=request.guided_decoding_params,
            lookahead_config=request.lookahead_config,
            kv_cache_retention_config=request.kv_cache_retention_config,
            type=request.request_type,
            context_phase_params=request.context_phase_params,
        )

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        if request.max_tokens is not None:
            return request.max_tokens
        # At least 1: a prompt that leaves no room is then refused by the executor, with the numbers.
        room = max(1, self.executor.longest_sequence - prompt_tokens)
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)

    def _output_state(self, request: GenerationRequest, index: int, prompt_tokens: int) -> OutputState:
        decoder = stops = None
        if self.tokenizer is not None and request.stop_strings:
            stops = TextStream(self.tokenizer, request.stop_strings, request.include_stop)
        elif self.tokenizer is not None:
            decoder = self.tokenizer.incremental_decoder()
        return OutputState(
            index,
            decoder,
            stops,
            end_ids=frozenset() if request.ignore_eos else frozenset(self.end_ids),
            prompt_tokens=prompt_tokens,
            streaming=request.streaming,
        )

    # -- from the executor --------------------------------------------------------------------------------------------

    def _on_responses(self, responses: list[Response]) -> None:
        """On the executor's thread, once an iteration: hand all of it over with one wake-up."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, responses)

    def _deliver(self, responses: list[Response]) -> None:
        outputs = self._outputs
        now = self._loop.time()
        for response in responses:
            entry = outputs.get(response.request_id)
            if entry is None:
                continue  # ended here already, by a stop string or because its client left
            stream, output = entry
            if response.error is not None:
                self._drop_outputs(stream)
                stream.fail(response.error)
                continue
            record = stream.record
            if record.first_token_at is None:
                record.first_token_at = now
            record.last_token_at = now
            delta, finished = output.take(response.result)
            if delta is not None:
                stream.put(delta)
            if finished is not None:
                del outputs[response.request_id]
                if not response.is_final:
                    self.executor.cancel_request(response.request_id)
                stream.put(finished)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _drop_outputs(self, stream: GenerationStream) -> None:
        """Forget a stream's open outputs and cancel them in the executor."""
        for executor_id in stream.accepted.executor_request_ids:
            if self._outputs.pop(executor_id, None) is not None:
                self.executor.cancel_request(executor_id)

    def _close_stream(self, stream: GenerationStream) -> None:
        self._drop_outputs(stream)
        if self._streams.pop(stream.accepted.request_id, None) is not None:
            stream.record.error = stream.error
            stream.record.ended_at = self._loop.time()
            self._remember(stream.accepted)
            self._observer.on_ended(stream.record)

    def _remember(self, accepted: Accepted) -> None:
        self._ended.pop(accepted.request_id, None)
        self._ended[accepted.request_id] = accepted.executor_request_ids
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    async def _watch_readers(self) -> None:
        """Cancel requests whose reader has been busy with one event for too long."""
        limit = self.slow_reader_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = self._loop.time()
            for stream in list(self._streams.values()):
                if stream.busy_since is not None and now - stream.busy_since > limit:
                    _logger.warning("request %s: its reader is stuck; cancelled", stream.accepted.request_id)
                    self._drop_outputs(stream)
                    stream.interrupt(
                        SlowReaderError(f"the client took no events for {limit:g} s; its request was cancelled")
                    )
