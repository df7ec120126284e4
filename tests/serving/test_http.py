"""The OpenAI-compatible HTTP API, with the official client and with plain requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.api.request import GuideType
from executor.serving.credentials import Credentials
from tests.serving.byte_tokenizer import END_ID
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import RunningServer, load_byte_tokenizer, running_server
from tests.serving.test_grpc_inference import until

PLAIN_TOKENIZER = load_byte_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")


@asynccontextmanager
async def openai_client(
    executor: FakeExecutor | None = None, **options: object
) -> AsyncIterator[tuple[openai.AsyncOpenAI, RunningServer]]:
    async with (
        running_server(executor, http=True, tokenizer=PLAIN_TOKENIZER, **options) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, server


@asynccontextmanager
async def plain_client(
    executor: FakeExecutor | None = None, **options: object
) -> AsyncIterator[tuple[httpx.AsyncClient, RunningServer]]:
    async with (
        running_server(executor, http=True, tokenizer=PLAIN_TOKENIZER, **options) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        yield client, server


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- with the official client


async def test_a_chat_completion_answers_with_content_and_usage() -> None:
    async with openai_client() as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=user("hello"), max_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hellohel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


async def test_a_streamed_chat_completion_is_the_same_text() -> None:
    async with openai_client() as (client, _):
        stream = await client.chat.completions.create(
            model="fake", messages=user("héllo"), max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "héllohéllo"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_comes_with_every_chunk_where_asked() -> None:
    async with openai_client() as (client, _):
        stream = await client.chat.completions.create(
            model="fake", messages=user("ab"), max_tokens=9, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        )  # fmt: skip
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert len(counts) >= 3


async def test_completions_take_text_and_token_ids_one_or_many() -> None:
    async with openai_client() as (client, _):
        for prompt, texts in (
            ("ab", ["aba"]),
            ([99, 100], ["cdc"]),
            (["ab", "x"], ["aba", "xxx"]),
            ([[99, 100], [101]], ["cdc", "eee"]),
        ):
            for streaming in (False, True):
                if streaming:
                    said = [""] * len(texts)
                    async for chunk in await client.completions.create(
                        model="fake", prompt=prompt, max_tokens=3, stream=True
                    ):
                        said[chunk.choices[0].index] += chunk.choices[0].text
                else:
                    answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=3)
                    said = [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
                assert said == texts


async def test_completions_give_16_tokens_unless_told() -> None:
    async with openai_client() as (client, _):
        answer = await client.completions.create(model="fake", prompt="x")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_n_gives_as_many_choices() -> None:
    async with openai_client() as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=user("ab"), max_tokens=2, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {"ab"}
        stream = await client.chat.completions.create(model="fake", messages=user("ab"), max_tokens=2, n=3, stream=True)
        finished = [c.choices[0].index async for c in stream if c.choices[0].finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with openai_client() as (client, _):
        for stop in ("lo", ["zz", "lo"]):
            answer = await client.chat.completions.create(model="fake", messages=user("hello"), stop=stop)
            assert answer.choices[0].message.content == "hel"
            assert answer.choices[0].finish_reason == "stop"


async def test_parameters_reach_the_executor_and_defaults_are_openais() -> None:
    executor = FakeExecutor()
    async with openai_client(executor) as (client, _):
        await client.chat.completions.create(model="fake", messages=user("x"), max_completion_tokens=1)
        await client.chat.completions.create(
            model="fake", messages=user("x"), max_tokens=1, temperature=0, top_p=0.5, seed=-1, user="blue",
            frequency_penalty=0.5, presence_penalty=-0.5, response_format={"type": "json_object"},
            extra_body={"top_k": 3, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [7], "priority": 1.0},
        )  # fmt: skip
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await client.chat.completions.create(
            model="fake", messages=user("x"), max_tokens=1,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        )  # fmt: skip
    plain, full, guided = executor.requests
    assert plain.sampling_config.temperature == 1.0
    assert plain.end_id == END_ID
    sampling = full.sampling_config
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 2**64 - 1)
    assert (sampling.top_k, sampling.min_p) == (3, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (full.tenant, full.end_id, full.stop_words, full.priority) == ("blue", None, [[7]], 1.0)
    assert full.guided_decoding_params is not None
    assert full.guided_decoding_params.guide_type is GuideType.JSON
    assert guided.guided_decoding_params is not None
    assert guided.guided_decoding_params.guide_type is GuideType.JSON_SCHEMA
    assert json.loads(guided.guided_decoding_params.guide or "") == schema


async def test_log_probs_come_in_both_shapes_with_bytes_that_round_trip() -> None:
    """Tokens that are parts of characters once came as garbage."""
    async with openai_client() as (client, _):
        answer = await client.chat.completions.create(
            model="fake", messages=user("é"), max_tokens=2, logprobs=True, top_logprobs=0
        )
        entries = answer.choices[0].logprobs
        assert entries is not None
        assert entries.content is not None
        assert bytes(byte for entry in entries.content for byte in entry.bytes or ()).decode() == "é"
        assert [entry.logprob for entry in entries.content] == [-0.25, -0.25]
        completion = await client.completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=0)
        log_probs = completion.choices[0].logprobs
        assert log_probs is not None
        assert log_probs.tokens == ["a", "b", "c"]
        assert log_probs.text_offset == [0, 1, 2]


async def test_models_are_listed() -> None:
    async with openai_client() as (client, _):
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            await client.chat.completions.create(model="other", messages=user("x"))


async def test_errors_are_the_clients_own_types_and_name_the_parameter() -> None:
    executor = FakeExecutor(max_queue_size=1)
    executor.hold()
    async with openai_client(executor) as (client, _):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake", messages=user("x"), top_p=3)
        assert bad.value.param == "sampling_config.top_p"
        first = asyncio.ensure_future(client.chat.completions.create(model="fake", messages=user("x"), max_tokens=1))
        await until(lambda: executor.num_unfinished_requests == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="fake", messages=user("x"))
        assert full.value.response.headers["retry-after"] == "1"
        executor.release()
        await first


async def test_an_engine_failure_is_a_500_or_an_error_in_the_stream() -> None:
    async with openai_client(FakeExecutor(fail_at=3)) as (client, _):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="fake", messages=user("x"), max_tokens=9)
        stream = await client.chat.completions.create(model="fake", messages=user("x"), max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            _ = [chunk async for chunk in stream]


async def test_a_client_that_leaves_cancels_its_request_streaming_or_not() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with openai_client(executor) as (client, server):
        stream = await client.chat.completions.create(model="fake", messages=user("x"), stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: executor.num_unfinished_requests == 0)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="fake", messages=user("x"), timeout=0.2)
        await until(lambda: executor.num_unfinished_requests == 0)
        assert server.server.generation.num_live_requests == 0


async def test_a_bearer_token_is_the_api_key(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    credentials = Credentials.load(bearer_token_file=tmp_path / "token")
    async with running_server(http=True, credentials=credentials) as server:
        for key, is_right in (("s3cret", True), ("guess", False)):
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if is_right:
                    assert [model.id async for model in client.models.list()] == ["fake"]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
        async with httpx.AsyncClient() as anybody:
            assert (await anybody.get(f"{server.url}/health")).status_code == 200
            assert (await anybody.get(f"{server.url}/metrics")).status_code == 401


# -- plain HTTP

BAD_BODIES = [
    ("{", 400, None),
    ("[]", 400, None),
    ("{}", 400, "messages"),
    ('{"messages": []}', 400, "chat.messages"),
    ('{"messages": [{"role": "user"}]}', 400, "messages[0].content"),
    ('{"messages": [{"content": "x"}]}', 400, "messages[0].role"),
    ('{"messages": [{"role": "user", "content": "x", "mood": 1}]}', 400, "messages[0].mood"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "messages[0].content[0].type"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "chat.messages[0].content"),
    ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tokens"),
    ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1.5}', 400, "max_tokens"),
    ('{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400, "n"),
    ('{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400, "temperature"),
    ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature"),
    ('{"messages": [{"role": "user", "content": "x"}], "stop": 1}', 400, "stop"),
    ('{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', 400, "stop_strings[0]"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', 400, "tools"),
    ('{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 2}}', 400, "logit_bias"),
    ('{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}', 400, "top_logprobs"),
    ('{"messages": [{"role": "user", "content": "x"}], "stream_options": {}}', 400, "stream_options"),
    ('{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": 1}}', 400, "response_format.type"),
    ('{"messages": [{"role": "user", "content": "x"}], "made_up": 1}', 400, "made_up"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), BAD_BODIES)
async def test_a_bad_body_names_its_field_and_the_service_goes_on(body: str, status: int, param: str | None) -> None:
    async with plain_client() as (client, _):
        response = await client.post("/v1/chat/completions", content=body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == param
        good = await client.post("/v1/chat/completions", json={"messages": user("ok"), "max_tokens": 2})
        assert good.json()["choices"][0]["message"]["content"] == "ok"


async def test_a_body_that_is_too_large_is_413_and_an_unknown_path_404() -> None:
    async with plain_client(max_message_bytes=2000) as (client, _):
        assert (await client.post("/v1/completions", json={"prompt": "x" * 3000})).status_code == 413
        missing = await client.get("/v2/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get("/v1/completions")).status_code == 405


async def test_a_live_x_request_id_is_409_and_can_be_aborted() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with plain_client(executor) as (client, server):
        body, headers = {"messages": user("x"), "max_tokens": 5}, {"x-request-id": "mine"}
        first = asyncio.ensure_future(client.post("/v1/chat/completions", json=body, headers=headers))
        await until(lambda: executor.num_unfinished_requests == 1)
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 409
        assert server.server.generation.abort("mine")
        assert (await first).json()["choices"][0]["finish_reason"] == "cancelled"


async def test_health_is_503_while_stalled_or_draining() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with plain_client(executor, progress_limit_seconds=0.1) as (client, server):
        assert (await client.get("/health")).json() == {"status": "serving"}
        call = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        await asyncio.sleep(0.5)
        stalled = await client.get("/health")
        assert (stalled.status_code, stalled.json()["status"]) == (503, "stalled")
        executor.release()
        assert (await call).status_code == 200
        server.server.generation.is_draining = True
        draining = await client.get("/health")
        assert (draining.status_code, draining.json()["status"]) == (503, "draining")
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_client_that_stops_reading_loses_its_request() -> None:
    executor = FakeExecutor()
    async with plain_client(executor, slow_reader_seconds=0.3) as (_, server):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"prompt": "x" * 64, "max_tokens": 6000, "stream": True, "logprobs": 5, "n": 32}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await reader.readline()
        await until(lambda: executor.requests != [])
        await until(lambda: server.server.generation.num_live_requests == 0, seconds=20)
        assert executor.num_unfinished_requests == 0
        writer.transport.abort()


async def test_metrics_have_names_of_our_own_and_those_of_the_triton_backend() -> None:
    async with plain_client() as (client, _):
        for number in range(3):
            await client.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 5 + number})
        await client.post("/v1/completions", json={"prompt": "", "max_tokens": 5})
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['inflight_requests_total{outcome="LENGTH"}'] == "3.0"
    assert lines['inflight_request_refusals_total{code="INVALID_ARGUMENT"}'] == "1.0"
    assert lines["inflight_prompt_tokens_total"] == "12.0"
    assert lines["inflight_generation_tokens_total"] == "18.0"
    assert lines["inflight_time_to_first_token_seconds_count"] == "3.0"
    assert lines["inflight_request_latency_seconds_count"] == "3.0"
    assert lines["inflight_iterations_total"] == "18.0"
    assert lines['inflight_live_requests{state="active"}'] == "0.0"
    assert lines['nv_llm_input_token_len_bucket{le="10.0"}'] == "3.0"
    families = {
        "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
        "nv_trt_llm_runtime_memory_metrics": ("memory_type", "cpu gpu pinned"),
        "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "max free used tokens_per reused fraction"),
        "nv_trt_llm_inflight_batcher_metrics": (
            "inflight_batcher_specific_metric",
            "total_context_tokens generation_requests micro_batch_id paused_requests",
        ),
        "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
    }
    samples = {_without_label_order(name): value for name, value in lines.items()}
    for family, (label, members) in families.items():
        for member in members.split():
            assert _without_label_order(f'{family}{{model="fake",version="1",{label}="{member}"}}') in samples
    stamp = samples[_without_label_order(f'{family}{{model="fake",version="1",general_type="timestamp"}}')]
    assert float(stamp) == datetime(2026, 11, 30, 12, 0, 0, 250_000, tzinfo=UTC).timestamp() * 1e6


def _without_label_order(sample: str) -> tuple[str, frozenset[str]]:
    metric, _, labels = sample.rstrip("}").partition("{")
    return metric, frozenset(labels.split(","))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt", "messages", "max_tokens", "n", "stop", "stream", "temperature", "top_p", "top_k", "seed", "logprobs",
        "stream_options", "response_format", "user", "logit_bias", "min_tokens", "priority", "best_of", "model",
    ]
)  # fmt: skip


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.dictionaries(names, json_values, max_size=5), min_size=10, max_size=30))
def test_no_body_is_a_500_or_stops_the_service(bodies: list[dict[str, object]]) -> None:
    async def run() -> None:
        async with plain_client(FakeExecutor(lambda *_: END_ID)) as (client, _):
            for body in bodies:
                for path in ("/v1/completions", "/v1/chat/completions"):
                    response = await client.post(path, json={"prompt": "x", **body} if "chat" not in path else body)
                    assert response.status_code in (200, 400, 404), response.text
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
