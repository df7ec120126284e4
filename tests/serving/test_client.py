"""The Python clients, against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import grpc
import pytest

from batch_manager.plan import Phase
from batch_manager.request import FinishReason
from executor.api.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from executor.api.kv_cache import KVCacheEvent, KVCacheRemovedData
from executor.api.request import GuidedDecodingParams, GuideType, KvCacheRetentionConfig, LookaheadDecodingConfig
from executor.api.response import Usage
from executor.api.sampling_config import SamplingConfig
from executor.client import (
    Accepted,
    AsyncInferenceClient,
    ChatMessage,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    GenerationRequest,
    InferenceClient,
    StopMatch,
    TextPrompt,
    TokenPrompt,
)
from executor.client.errors import CallError
from executor.client.messages import PromptLike, event_of, generation_request, request_message
from executor.serving import grpc_messages
from executor.serving.events import TokenLogProb
from protos.inflight.v1 import control_pb2, inference_pb2
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import running_server

T = TypeVar("T")


async def with_client(executor: FakeExecutor, use: Callable[[InferenceClient], T]) -> T:
    """What `use` returns, run in a thread of its own with a blocking client."""
    async with running_server(executor) as server:

        def run() -> T:
            with InferenceClient(server.target) as client:
                return use(client)

        return await asyncio.to_thread(run)


def check_events(events: list[Event]) -> None:
    assert isinstance(events[0], Accepted)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == "abcab"
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].usage.completion_tokens == 5


async def test_the_blocking_client_yields_typed_events() -> None:
    check_events(await with_client(FakeExecutor(), lambda client: list(client.generate("abc", max_tokens=5))))


async def test_the_asyncio_client_yields_typed_events() -> None:
    async with running_server() as server, AsyncInferenceClient(server.target) as client:
        check_events([event async for event in client.generate("abc", max_tokens=5)])


async def test_leaving_a_generation_cancels_it() -> None:
    executor = FakeExecutor(step_seconds=0.001)

    def use(client: InferenceClient) -> None:
        with client.generate("abc", max_tokens=8000) as events:
            for event in events:
                if isinstance(event, Delta):
                    break

    await with_client(executor, use)
    assert executor.num_unfinished_requests == 0


async def test_errors_are_those_of_the_executor() -> None:
    def use(client: InferenceClient) -> None:
        with pytest.raises(InvalidRequestError) as invalid:
            list(client.generate("", max_tokens=5))
        assert invalid.value.field == "text"
        held = iter(client.generate("x", max_tokens=5, request_id="mine"))
        next(held)
        with pytest.raises(DuplicateRequestError):
            list(client.generate("x", request_id="mine"))
        with pytest.raises(QueueFullError):
            list(client.generate("x"))
        assert client.abort("mine")
        assert [event.finish_reason for event in held if isinstance(event, Finished)] == [FinishReason.CANCELLED]
        assert not client.abort("mine")

    executor = FakeExecutor(max_queue_size=1)
    executor.hold()
    await with_client(executor, use)


async def test_a_deadline_is_a_call_error() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor) as server, AsyncInferenceClient(server.target) as client:
        with pytest.raises(CallError) as late:
            _ = [event async for event in client.generate("x", timeout=0.05)]
    assert late.value.status == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_iteration_table_comes_as_rows() -> None:
    async with running_server() as server, AsyncInferenceClient(server.target) as client:
        _ = [event async for event in client.generate("abcd", max_tokens=2)]
        rows = await client.iteration_table()
    assert [(row.phase, row.num_scheduled_tokens) for row in rows] == [(Phase.CONTEXT, 4), (Phase.GENERATION, 1)]


async def test_an_operator_reads_and_changes_a_server_through_either_client() -> None:
    executor = FakeExecutor()

    def use(client: InferenceClient) -> None:
        client.pause()
        assert client.health().state == control_pb2.HEALTH_STATE_PAUSED
        events = client.generate("ab", max_tokens=2, request_id="job")
        assert isinstance(next(iter(events)), Accepted)
        assert [entry.executor_request_id for entry in client.explain("job")] == [1]
        with pytest.raises(CallError, match="NOT_FOUND"):
            client.receipt("job")
        client.resume()
        _ = list(events)
        (receipt,) = client.receipt("job")
        assert (receipt.num_prompt_tokens, receipt.num_generated_tokens) == (2, 2)
        assert client.update_limits(max_batch_size=3).max_batch_size == 3
        assert client.server_info().limits.max_batch_size == 3
        assert client.model_info().vocab_size == executor.spec.vocab_size
        assert client.load().num_unfinished_requests == 0
        assert not client.abort("job")
        with pytest.raises(InvalidRequestError, match="limits cannot be sent"):
            client.update_limits(max_batch_size=-1)

    await with_client(executor, use)
    async with running_server() as server, AsyncInferenceClient(server.target) as client:
        await client.pause()
        assert (await client.health()).state == control_pb2.HEALTH_STATE_PAUSED
        await client.resume()
        _ = [event async for event in client.generate("abc", max_tokens=2, request_id="job")]
        assert [entry.num_prompt_tokens for entry in await client.receipt("job")] == [3]
        with pytest.raises(CallError, match="NOT_FOUND"):
            await client.explain("job")
        assert (await client.update_limits(max_queue_size=7)).max_queue_size == 7
        assert (await client.model_info()).has_tokenizer
        assert (await client.server_info()).schema_revision == grpc_messages.SCHEMA_REVISION
        assert (await client.load()).num_unfinished_requests == 0


async def test_the_kv_cache_is_seen_pinned_and_followed_through_either_client() -> None:
    executor = FakeExecutor(step_seconds=0.01)
    executor.kv_events = [KVCacheEvent(1, KVCacheRemovedData([5]), 8)]

    def use(client: InferenceClient) -> None:
        pin = client.pin_prefix([1] * 16, seconds=2.5)
        assert [each.pin_id for each in client.kv_ledger().pins] == [pin.pin_id]
        client.unpin_prefix(pin.pin_id)
        assert not client.kv_ledger().pins
        assert next(client.kv_events()).event_id == 1
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            client.pin_prefix([-1])

    await with_client(executor, use)
    async with running_server() as server, AsyncInferenceClient(server.target) as client:
        pin = await client.pin_prefix([1] * 16)
        assert [each.pin_id for each in (await client.kv_ledger()).pins] == [pin.pin_id]
        await client.unpin_prefix(pin.pin_id)
        with pytest.raises(CallError, match="event_buffer_max_size"):
            await anext(client.kv_events())


async def test_iterations_are_followed_while_requests_run() -> None:
    async with running_server(FakeExecutor(step_seconds=0.01)) as server, AsyncInferenceClient(server.target) as client:

        async def follow() -> list[int]:
            seen = []
            async for stats in client.iteration_stats():
                seen.append(stats.iteration)
                if len(seen) == 5:
                    return seen
            return seen

        following = asyncio.ensure_future(follow())
        with client.generate("abc", max_tokens=500, streaming=True) as generation:
            async for _ in generation:
                if following.done():
                    break
        seen = await following
    assert seen == list(range(seen[0], seen[0] + 5))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt("hi")),
        ([ChatMessage("user", "hi")], ChatPrompt([ChatMessage("user", "hi")])),
        ([1, 2], TokenPrompt([1, 2])),
        ([], TokenPrompt([])),
        (TextPrompt("hi"), TextPrompt("hi")),
    ],
)
def test_prompts_come_in_any_form(prompt: PromptLike, expected: object) -> None:
    assert generation_request(prompt).prompt == expected


def test_a_mixed_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a list of ChatMessage or a list of token ids"):
        generation_request([1, ChatMessage("user", "hi")])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(TextPrompt("hi"), stop_strings=[], stop_token_ids=[], bad_words=[]),
        GenerationRequest(
            ChatPrompt([ChatMessage(role, "hi") for role in ("system", "user", "assistant", "tool")]),
            max_tokens=3,
            streaming=False,
            sampling_config=SamplingConfig(temperature=0.5, top_k=0, seed=2**63, min_tokens=1),
            return_log_probs=True,
            num_top_log_probs=2,
            stop_strings=["a"],
            stop_token_ids=[1],
            include_stop=True,
            ignore_eos=True,
            bad_words=[[1, 2]],
            num_return_sequences=2,
            priority=0.0,
            tenant="t",
            cache_salt_id=0,
            allotted_time_ms=0,
            guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, "a+"),
            lookahead_config=LookaheadDecodingConfig(1, 2, 3),
            request_id="r",
        ),
        GenerationRequest(
            TokenPrompt([1]),
            stop_strings=[],
            stop_token_ids=[],
            bad_words=[],
            return_prompt_log_probs=True,
            guided_decoding_params=GuidedDecodingParams(GuideType.STRUCTURAL_TAG, "{}"),
            kv_cache_retention_config=KvCacheRetentionConfig(
                [
                    KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 16, 90, 1500),
                    KvCacheRetentionConfig.TokenRangeRetentionConfig(16, None, 0),
                ],
                decode_retention_priority=20,
                decode_duration_ms=2500,
            ),
        ),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_: GenerationRequest) -> None:
    wire = request_message(request_).SerializeToString()
    assert grpc_messages.generation_request(inference_pb2.GenerateRequest.FromString(wire)) == request_


@pytest.mark.parametrize(
    "event",
    [
        Accepted("r", 5, (1, 2)),
        Delta(1, "x", [1, 2], [TokenLogProb(-0.5, ((7, -0.25), (8, -1.5))), TokenLogProb(-1.0)]),
        *(
            Finished(0, reason, match, Usage(1, 2, 3))
            for reason, match in [
                (FinishReason.END_ID, StopMatch(end_id=0)),
                (FinishReason.STOP_WORDS, StopMatch(stop_token_id=3)),
                (FinishReason.STOP_WORDS, StopMatch(stop_string="s")),
                (FinishReason.LENGTH, None),
                (FinishReason.TIMED_OUT, None),
                (FinishReason.CANCELLED, None),
            ]
        ),
        Finished(0, FinishReason.LENGTH, None, Usage(3, 1, 0), (-0.25, -1.5)),
    ],
)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    wire = grpc_messages.response_message(event).SerializeToString()
    assert event_of(inference_pb2.GenerateResponse.FromString(wire)) == event


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"stop_token_ids": [-1]},
        {"request_id": "\ud800"},
        {"sampling_config": SamplingConfig(beam_width=2)},
        {"kv_cache_retention_config": KvCacheRetentionConfig(directory="blocks")},
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        request_message(generation_request("x", **fields))  # type: ignore[arg-type]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="system, user, assistant or tool"):
        request_message(generation_request([ChatMessage("unspecified", "x")]))
