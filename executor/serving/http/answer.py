"""Writes the answer to a request for one or several prompts: as one JSON object, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from executor.api.errors import RequestError
from executor.serving.events import Delta, Event, Finished
from executor.serving.generation import SlowReaderError
from executor.serving.http.api import FINISH_REASONS, Api, ChoiceState
from executor.serving.http.connection import ClientLeftError, ending_with_the_connection
from executor.serving.http.errors import error_body, error_response
from executor.serving.http.parameters import UsageReports
from executor.serving.stream import GenerationStream
from executor.text import Tokenizer

_logger = logging.getLogger(__name__)


class Answer(Response):
    """Reads the streams of a request and writes its answer.

    ```
    choice index = prompt index * outputs of each + output index
    ```
    """

    def __init__(
        self,
        api: Api,
        streams: Sequence[GenerationStream],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
        streaming: bool,
        usage_reports: UsageReports,
        prompt_tokens: int,
        outputs_each: int,
    ) -> None:
        self._api = api
        self._streams = streams
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._usage_reports = usage_reports
        self._outputs_each = outputs_each
        self._choices = [ChoiceState() for _ in range(len(streams) * outputs_each)]
        self._prompt_tokens = prompt_tokens
        self._reused_tokens = [0] * len(streams)
        self._head = {
            "id": api.id_prefix + uuid.uuid4().hex,
            "object": api.chunk_name if streaming else api.object_name,
            "created": int(time.time()),
            "model": model_name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as live:
            for stream in self._streams:
                live.enter_context(stream)
            try:
                async with ending_with_the_connection(receive):
                    if self._streaming:
                        await self._stream(send)
                    else:
                        response = await self._whole()
                        await response(scope, receive, send)
            except ClientLeftError:
                _logger.debug("%s: the client left", self._head["id"])

    async def _whole(self) -> Response:
        try:
            async for prompt_index, event in _merged(self._streams):
                index = self._note(prompt_index, event)
                if isinstance(event, Delta):
                    self._choices[index].delta = event
        except RequestError as error:
            return error_response(error)
        choices = [self._api.choice(index, state, self._tokenizer) for index, state in enumerate(self._choices)]
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage()})

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        try:
            async for prompt_index, event in _merged(self._streams):
                index = self._note(prompt_index, event)
                state = self._choices[index]
                if isinstance(event, Delta):
                    await write(self._chunk([self._api.chunk(index, state, event, self._tokenizer)]))
                    state.is_begun = True
                    state.text_length += len(event.text)
                elif isinstance(event, Finished):
                    await write(self._chunk([self._api.last_chunk(index, FINISH_REASONS[event.finish_reason])]))
        except SlowReaderError:
            raise  # nobody reads: there is nobody to tell
        except RequestError as error:
            await write(json.dumps(error_body(error)))
        else:
            if self._usage_reports is not UsageReports.NONE:
                await write(self._chunk([], is_last=True))
        await write("[DONE]", more=False)

    def _note(self, prompt_index: int, event: Event) -> int:
        """Take in an event; returns the index of its choice (0 for those that have none)."""
        if isinstance(event, Delta):
            index = prompt_index * self._outputs_each + event.output_index
            self._choices[index].num_tokens += len(event.token_ids)
            return index
        if isinstance(event, Finished):
            index = prompt_index * self._outputs_each + event.output_index
            self._choices[index].finish_reason = event.finish_reason
            self._reused_tokens[prompt_index] = max(self._reused_tokens[prompt_index], event.usage.reused_tokens)
            return index
        return 0

    def _usage(self) -> dict[str, Any]:
        """Token counts so far."""
        completion_tokens = sum(state.num_tokens for state in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused_tokens)},
        }

    def _chunk(self, choices: list[dict[str, Any]], *, is_last: bool = False) -> str:
        chunk = {**self._head, "choices": choices}
        if self._usage_reports is not UsageReports.NONE:
            reported = is_last or self._usage_reports is UsageReports.EVERY_CHUNK
            chunk["usage"] = self._usage() if reported else None
        return json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))


async def _merged(streams: Sequence[GenerationStream]) -> AsyncIterator[tuple[int, Event]]:
    """The events of all streams with the index of theirs, as they come."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    ready: asyncio.Queue[tuple[int, Event] | RequestError | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: GenerationStream) -> None:
        try:
            async for event in stream:
                await ready.put((index, event))
        except RequestError as error:
            await ready.put(error)
        await ready.put(None)

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await ready.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, RequestError):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
