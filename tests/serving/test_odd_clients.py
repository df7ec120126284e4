"""What clients did to servers of this kind (docs/pain_points.md), against a server process with a real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from batch_manager.request import FinishReason
from executor.api.errors import InvalidRequestError
from executor.api.sampling_config import SamplingConfig
from executor.client import (
    AsyncInferenceClient,
    Delta,
    Event,
    Finished,
    GenerationRequest,
    InferenceClient,
    TokenPrompt,
)
from executor.client.messages import GenerationFields, PromptLike
from tests.serving.byte_tokenizer import END_ID
from tests.serving.server_process import serving
from tests.serving.tiny_engine_dir import build_tiny_engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine_dir = build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")
    with serving(engine_dir, "--log_level", "error") as (_, address):
        yield address


async def collect(client: AsyncInferenceClient, prompt: PromptLike, **fields: object) -> list[Event]:
    return [event async for event in client.generate(prompt, timeout=60, **fields)]  # type: ignore[arg-type]


def token_ids(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


async def test_odd_inputs_hold_up_nobody_and_change_nobodys_output(target: str) -> None:
    """An end token or an escaped quote in one prompt froze all requests."""
    odd: list[tuple[PromptLike, dict[str, object]]] = [
        (TokenPrompt([END_ID, END_ID]), {"max_tokens": 4}),
        ('say \\"yes\\"', {"max_tokens": 4}),
        ("\x00\ufffd</s><|im_end|>", {"max_tokens": 4}),
        (TokenPrompt([2**31]), {"max_tokens": 4}),
        ("x" * 1000, {"max_tokens": 4}),
        ("x", {"max_tokens": 100_000}),
        ("x", {"max_tokens": 4, "stop_token_ids": [2**31]}),
    ]
    async with AsyncInferenceClient(target) as client:
        alone = token_ids(await collect(client, "an ordinary prompt", max_tokens=30, ignore_eos=True))
        results = await asyncio.gather(
            *(collect(client, prompt, **fields) for prompt, fields in odd),
            *(collect(client, "an ordinary prompt", max_tokens=30, ignore_eos=True) for _ in range(4)),
            return_exceptions=True,
        )
    for result in results[: len(odd)]:
        assert isinstance(result, InvalidRequestError) or isinstance(result[-1], Finished), result
    assert sum(isinstance(result, InvalidRequestError) for result in results) == 4
    assert [token_ids(result) for result in results[len(odd) :]] == [alone] * 4


def test_a_request_whose_time_is_over_ends_though_nothing_runs(target: str) -> None:
    """Timers ran only when there was new traffic."""
    with InferenceClient(target) as client:
        client.pause()
        try:
            started = time.monotonic()
            events = list(client.generate("x", allotted_time_ms=50, timeout=30))
        finally:
            client.resume()
    assert time.monotonic() - started < 5
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.TIMED_OUT
    assert not token_ids(events)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("return_log_probs", [True, False])
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "waiting"])
def test_an_aborted_request_ends_once_with_cancelled(
    target: str, streaming: bool, return_log_probs: bool, is_running: bool
) -> None:
    """Cancelling a streaming request with log probabilities brought the server down."""
    fields: GenerationFields = {
        "request_id": "job",
        "ignore_eos": True,
        "streaming": streaming,
        "return_log_probs": return_log_probs,
        "return_prompt_log_probs": return_log_probs,
        "num_return_sequences": 2,
    }
    with InferenceClient(target) as client:
        if not is_running:
            client.pause()
        try:
            events = iter(client.generate("x" * 20, timeout=60, **fields))
            seen = [next(events)]
            if is_running and streaming:
                seen.append(next(events))
            assert client.abort("job")
        finally:
            client.resume()
        seen += events
        finals = [event for event in seen if isinstance(event, Finished)]
        assert sorted(final.output_index for final in finals) == [0, 1]
        assert {final.finish_reason for final in finals} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
        if not is_running:
            assert {final.finish_reason for final in finals} == {FinishReason.CANCELLED}
        assert not client.abort("job")


async def test_requests_that_set_different_options_share_a_batch(target: str) -> None:
    """A batch that mixed set and unset sampling options failed as a whole."""
    options = [
        SamplingConfig(),
        SamplingConfig(temperature=0.7, seed=1),
        SamplingConfig(top_k=5, seed=2),
        SamplingConfig(top_p=0.5, top_p_decay=0.9, seed=3),
        SamplingConfig(repetition_penalty=1.2, presence_penalty=0.5),
        SamplingConfig(min_p=0.1, min_tokens=4, seed=4),
    ]
    async with AsyncInferenceClient(target) as client:
        requests = [
            GenerationRequest(TokenPrompt([1, 2, 3]), max_tokens=12, ignore_eos=True, sampling_config=config)
            for config in options
        ]

        async def run(request: GenerationRequest) -> list[int]:
            return token_ids([event async for event in client.start(request, timeout=60)])

        alone = [await run(request) for request in requests]
        assert await asyncio.gather(*(run(request) for request in requests)) == alone
    assert all(len(output) == 12 for output in alone)
