"""`inflight.v1.Inference`, over the wire."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from google.protobuf import unknown_fields

from executor.api.request import KvCacheRetentionConfig
from executor.serving.grpc_messages import SCHEMA_REVISION
from protos.inflight.v1 import inference_pb2 as pb
from tests.serving.byte_tokenizer import END_ID
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import RunningServer, retry_seconds, running_server, violated_field


def text_of(events: list[pb.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events)


async def refusal(server: RunningServer, request: pb.GenerateRequest | bytes) -> grpc.aio.AioRpcError:
    """The status that the request ends with."""
    call = server.channel.unary_stream(
        "/inflight.v1.Inference/Generate",
        request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        response_deserializer=pb.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(request):
            pass
    return caught.value


async def test_a_prompt_streams_typed_events() -> None:
    async with running_server() as server:
        events = await server.generate(text="hello", max_tokens=8, streaming=True, request_id="r")
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    accepted = events[0].accepted
    assert (accepted.request_id, accepted.prompt_tokens) == ("r", 5)
    assert accepted.schema_revision == SCHEMA_REVISION
    assert list(accepted.executor_request_ids) == [1]
    assert text_of(events) == "hellohel"
    finished = events[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.WhichOneof("stop_match") is None
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 8)


async def test_every_field_reaches_the_executor() -> None:
    executor = FakeExecutor()
    async with running_server(executor) as server:
        await server.generate(
            input_token_ids=pb.TokenSequence(token_ids=[1, 2, 3]),
            max_tokens=1,
            sampling_config=pb.SamplingConfig(
                temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=2**64 - 1, min_tokens=1, repetition_penalty=1.5,
                presence_penalty=-0.5, frequency_penalty=0.25, prompt_ignore_length=2, no_repeat_ngram_size=3,
                top_p_decay=0.5, top_p_min=0.125, top_p_reset_ids=9,
            ),
            output_config=pb.OutputConfig(return_log_probs=True, num_top_log_probs=4, return_prompt_log_probs=True),
            stop_token_ids=[65, 66],
            bad_words=[pb.TokenSequence(token_ids=[4, 5])],
            priority=0.75,
            tenant="blue",
            cache_salt_id=2**40,
            allotted_time_ms=1500,
            lookahead_config=pb.LookaheadDecodingConfig(
                max_window_size=4, max_ngram_size=3, max_verification_set_size=4
            ),
            kv_cache_retention_config=pb.KvCacheRetentionConfig(
                token_range_retention_configs=[
                    pb.TokenRangeRetentionConfig(token_start=0, token_end=2, priority=80, duration_ms=500),
                    pb.TokenRangeRetentionConfig(token_start=2),
                ],
                decode_duration_ms=2**40,
            ),
        )  # fmt: skip
    request = executor.requests[0]
    sampling = request.sampling_config
    assert request.input_token_ids == [1, 2, 3]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.75, 0.25)
    assert (sampling.seed, sampling.min_tokens, sampling.repetition_penalty) == (2**64 - 1, 1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
    assert (sampling.prompt_ignore_length, sampling.no_repeat_ngram_size) == (2, 3)
    assert (sampling.top_p_decay, sampling.top_p_min, sampling.top_p_reset_ids) == (0.5, 0.125, 9)
    assert request.output_config.return_log_probs
    assert request.output_config.num_top_log_probs == 4
    assert request.end_id == END_ID
    assert request.stop_words == [[65], [66]]
    assert request.bad_words == [[4, 5]]
    assert (request.priority, request.tenant, request.cache_salt_id) == (0.75, "blue", 2**40)
    assert request.allotted_time_seconds == 1.5
    assert request.lookahead_config is not None
    assert request.lookahead_config.max_ngram_size == 3
    assert request.output_config.return_prompt_log_probs
    part = KvCacheRetentionConfig.TokenRangeRetentionConfig
    assert request.kv_cache_retention_config == KvCacheRetentionConfig(
        [part(0, 2, 80, 500), part(2)], decode_duration_ms=2**40
    )


async def test_each_token_is_a_message_of_its_own_to_a_client_that_keeps_up() -> None:
    """Streams once came all at their end."""
    async with running_server(FakeExecutor(step_seconds=0.02)) as server:
        events = await server.generate(text="abc", max_tokens=10, streaming=True)
    assert [len(event.delta.token_ids) for event in events if event.HasField("delta")] == [1] * 10


async def test_prompt_log_probs_come_with_the_end_of_the_output() -> None:
    async with running_server() as server:
        wanted = pb.OutputConfig(return_prompt_log_probs=True)
        events = await server.generate(text="abcd", max_tokens=3, streaming=True, output_config=wanted)
        assert list(events[-1].finished.prompt_log_probs) == [-0.5] * 3
        assert not (await server.generate(text="abcd", max_tokens=3))[-1].finished.prompt_log_probs


async def test_unset_and_zero_are_told_apart() -> None:
    executor = FakeExecutor()
    async with running_server(executor) as server:
        await server.generate(text="x", max_tokens=1)
        zeros = pb.SamplingConfig(temperature=0, top_k=0)
        await server.generate(text="x", max_tokens=1, sampling_config=zeros, priority=0, cache_salt_id=0)
    unset, zero = executor.requests
    assert (unset.sampling_config.temperature, unset.sampling_config.top_k) == (None, None)
    assert (zero.sampling_config.temperature, zero.sampling_config.top_k) == (0, 0)
    assert (unset.priority, unset.cache_salt_id) == (0.5, None)
    assert (zero.priority, zero.cache_salt_id) == (0, 0)


BAD = {
    "retention priority": (
        pb.GenerateRequest(
            text="x", kv_cache_retention_config=pb.KvCacheRetentionConfig(decode_retention_priority=101)
        ),
        "kv_cache_retention_config",
    ),
    "retention range": (
        pb.GenerateRequest(
            text="x",
            kv_cache_retention_config=pb.KvCacheRetentionConfig(
                token_range_retention_configs=[pb.TokenRangeRetentionConfig(token_start=4, token_end=2)]
            ),
        ),
        "kv_cache_retention_config",
    ),
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (pb.GenerateRequest(text=""), "text"),
    "empty ids": (pb.GenerateRequest(input_token_ids=pb.TokenSequence()), "input_token_ids"),
    "empty chat": (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
    "no role": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])),
        "chat.messages[0].role",
    ),
    "unknown role": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=77, content="x")])),  # type: ignore[arg-type]
        "chat.messages[0].role",
    ),
    "empty id": (pb.GenerateRequest(text="x", request_id=""), "request_id"),
    "max_tokens 0": (pb.GenerateRequest(text="x", max_tokens=0), "max_tokens"),
    "id out of range": (
        pb.GenerateRequest(input_token_ids=pb.TokenSequence(token_ids=[2**32 - 1])),
        "input_token_ids",
    ),
    "top_p": (
        pb.GenerateRequest(text="x", sampling_config=pb.SamplingConfig(top_p=1.5)),
        "sampling_config.top_p",
    ),
    "not a number": (
        pb.GenerateRequest(text="x", sampling_config=pb.SamplingConfig(temperature=float("nan"))),
        "sampling_config.temperature",
    ),
    "no guide type": (
        pb.GenerateRequest(text="x", guided_decoding_params=pb.GuidedDecodingParams()),
        "guided_decoding_params.guide_type",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_value_is_invalid_argument_and_names_its_field(name: str) -> None:
    request, field = BAD[name]
    async with running_server() as server:
        error = await refusal(server, request)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violated_field(error) == field
        assert field.split(".")[-1].split("[")[0] in error.details()
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"


async def test_text_that_is_not_utf8_is_invalid_argument() -> None:
    async with running_server() as server:
        error = await refusal(server, b"\x1a\x04\xff\xfe\xfd\xfc")
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in error.details()
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"


async def test_a_newer_schema_revision_is_unimplemented() -> None:
    async with running_server() as server:
        error = await refusal(server, pb.GenerateRequest(text="x", schema_revision=SCHEMA_REVISION + 1))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert violated_field(error) == "schema_revision"


async def test_a_field_that_the_schema_does_not_have_is_unimplemented_and_named() -> None:
    """A server that skips what it does not know answers another question than the one asked."""
    nested = pb.SamplingConfig(top_k=1).SerializeToString() + b"\xf8\x07\x01"  # field 127, varint 1
    request = pb.GenerateRequest(text="x", max_tokens=1)
    request.sampling_config.MergeFromString(nested)
    assert len(unknown_fields.UnknownFieldSet(request.sampling_config)) == 1
    async with running_server() as server:
        error = await refusal(server, request)
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert violated_field(error) == "sampling_config.field 127"


async def test_a_live_id_is_already_exists() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor) as server:
        first = server.inference.Generate(pb.GenerateRequest(text="x", max_tokens=1, request_id="mine"))
        events = aiter(first)
        await anext(events)
        error = await refusal(server, pb.GenerateRequest(text="x", request_id="mine"))
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        executor.release()
        assert [event.WhichOneof("event") async for event in events] == ["delta", "finished"]
        assert text_of(await server.generate(text="y", max_tokens=1, request_id="mine")) == "y"


async def test_a_full_queue_is_resource_exhausted_and_says_when_to_retry() -> None:
    executor = FakeExecutor(max_queue_size=1)
    executor.hold()
    async with running_server(executor) as server:
        first = server.inference.Generate(pb.GenerateRequest(text="x", max_tokens=1))
        events = aiter(first)
        await anext(events)
        error = await refusal(server, pb.GenerateRequest(text="y"))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(error) == 1
        first.cancel()


async def test_a_large_message_is_resource_exhausted() -> None:
    async with running_server(max_message_bytes=1024) as server:
        error = await refusal(server, pb.GenerateRequest(text="x" * 2000))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"


async def test_an_engine_failure_is_internal_and_the_service_goes_on() -> None:
    executor = FakeExecutor(fail_at=3)
    async with running_server(executor) as server:
        error = await refusal(server, pb.GenerateRequest(text="x", max_tokens=9, streaming=True))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"


async def test_abort_ends_the_stream_with_cancelled() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running_server(executor) as server:
        call = server.inference.Generate(
            pb.GenerateRequest(text="x", max_tokens=8000, streaming=True, request_id="long")
        )
        stream = aiter(call)
        await anext(stream)
        outcome = await server.inference.Abort(pb.AbortRequest(request_id="long"))
        assert outcome.outcome == pb.ABORT_OUTCOME_ABORTED
        events = [event async for event in stream]
        assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
            pb.FINISH_REASON_CANCELLED
        ]
        outcome = await server.inference.Abort(pb.AbortRequest(request_id="long"))
        assert outcome.outcome == pb.ABORT_OUTCOME_NOT_LIVE


async def test_abort_of_an_empty_id_is_invalid_argument_and_aborts_nothing() -> None:
    """An empty id once aborted everything."""
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor) as server:
        call = server.inference.Generate(pb.GenerateRequest(text="x", max_tokens=2, request_id="mine"))
        stream = aiter(call)
        await anext(stream)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Abort(pb.AbortRequest())
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        executor.release()
        assert [event async for event in stream][-1].finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_cancelled_call_cancels_the_request() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running_server(executor) as server:
        call = server.inference.Generate(pb.GenerateRequest(text="x", max_tokens=8000, streaming=True))
        stream = aiter(call)
        await anext(stream)
        call.cancel()
        await until(lambda: executor.num_unfinished_requests == 0)
        assert executor.cancelled == [1]
        assert server.server.generation.num_live_requests == 0


async def test_a_deadline_that_passes_cancels_the_request() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in server.inference.Generate(pb.GenerateRequest(text="x"), timeout=0.1):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: executor.num_unfinished_requests == 0)


async def test_a_client_that_stops_reading_loses_its_request() -> None:
    """A stuck client once held its blocks for ever."""
    executor = FakeExecutor()
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with running_server(executor, slow_reader_seconds=0.3, channel_options=small_window) as server:
        call = server.inference.Generate(
            pb.GenerateRequest(
                text="x" * 64,
                max_tokens=4000,
                streaming=True,
                num_return_sequences=32,
                output_config=pb.OutputConfig(return_log_probs=True),
            )
        )
        stream = aiter(call)
        await anext(stream)
        await until(lambda: server.server.generation.num_live_requests == 0, seconds=20)
        assert executor.num_unfinished_requests == 0
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"
        call.cancel()


@pytest.mark.parametrize("num_clients", [pytest.param(100), pytest.param(1000, marks=pytest.mark.long)])
async def test_clients_that_leave_at_random_moments_leave_nothing_behind(num_clients: int) -> None:
    """Disconnects once brought servers down."""
    executor = FakeExecutor(step_seconds=0.001)
    moments = random.Random(0)
    async with running_server(executor) as server:

        async def leave(seconds: float) -> None:
            call = server.inference.Generate(pb.GenerateRequest(text="abc", max_tokens=60, streaming=True))
            reader = asyncio.ensure_future(read_all(call))
            await asyncio.wait([reader], timeout=seconds)
            call.cancel()
            finals = (await asyncio.gather(reader, return_exceptions=True))[0]
            assert isinstance(finals, asyncio.CancelledError) or finals == 1

        for _ in range(num_clients // 50):
            await asyncio.gather(*(leave(moments.uniform(0, 0.2)) for _ in range(50)))
        await until(lambda: executor.num_unfinished_requests == 0 and server.server.generation.num_live_requests == 0)
        assert text_of(await server.generate(text="ok", max_tokens=2)) == "ok"


async def test_64_concurrent_streams_all_end_with_the_text_they_should() -> None:
    """Forty clients at once have stopped servers for good."""
    executor = FakeExecutor(step_seconds=0.001)
    choices = random.Random(0)
    async with running_server(executor) as server:
        until_time = asyncio.get_running_loop().time() + 2

        async def client(number: int) -> int:
            num_done = 0
            while asyncio.get_running_loop().time() < until_time:
                length = choices.randint(1, 80)
                text = f"client {number} " * choices.randint(1, 20)
                events = await server.generate(text=text, max_tokens=length, streaming=choices.random() < 0.8)
                assert [event.finished.usage.completion_tokens for event in events if event.HasField("finished")] == [
                    length
                ]
                assert text_of(events) == (text * (length // len(text) + 1))[:length]
                num_done += 1
            return num_done

        done = await asyncio.gather(*(client(number) for number in range(64)))
        assert min(done) > 0
        assert executor.num_unfinished_requests == 0


async def read_all(call: grpc.aio.UnaryStreamCall) -> int:
    return sum([event.HasField("finished") async for event in call])


async def until(condition: object, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)
