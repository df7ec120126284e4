"""Requests and waiting, for tests that drive an Executor from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from executor import Executor, OutputConfig, Request, Response, Result

OpenExecutor = Callable[..., Executor]
WAIT = timedelta(seconds=60)


def request(prompt: list[int], max_tokens: int = 12, **fields: Any) -> Request:
    """A request whose results hold generated tokens only; `output` fields go to its `OutputConfig`."""
    output = fields.pop("output", {})
    return Request(prompt, max_tokens, output_config=OutputConfig(exclude_input_from_output=True, **output), **fields)


def finish(executor: Executor, request_id: int) -> list[Response]:
    """All responses of a request up to its final one."""
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        got = executor.await_responses(request_id, WAIT)
        assert got, f"request {request_id} gave no response in time"
        responses += got
    return responses


def run(executor: Executor, *requests: Request) -> list[list[Response]]:
    """Runs requests together; the responses of each."""
    return [finish(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def run_one(executor: Executor, wanted: Request) -> Result:
    """Runs a request that does not stream; its result."""
    return run(executor, wanted)[0][-1].result


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)
