"""The layer between the protocols and the Executor."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.request import FinishReason
from executor.api.errors import (
    DuplicateRequestError,
    EngineStepError,
    ErrorCode,
    ExecutorShutDownError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedFeatureError,
)
from executor.api.request import Request
from executor.api.sampling_config import SamplingConfig
from executor.serving.events import Accepted, Delta, Event, Finished, StopMatch, TokenLogProb
from executor.serving.generation import GenerationService
from executor.serving.generation_request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
)
from tests.serving.byte_tokenizer import END_ID, START_ID
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import load_byte_tokenizer, running_service


async def collect(service: GenerationService, request: GenerationRequest) -> list[Event]:
    with await service.start(request) as stream:
        return [event async for event in stream]


def text_of(events: list[Event], output_index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.output_index == output_index)


def finishes(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


def script(token_ids: list[int]) -> FakeExecutor:
    """An executor that says these tokens to everybody, the last one for ever."""
    return FakeExecutor(lambda _request, position: token_ids[min(position, len(token_ids) - 1)])


async def test_events_are_accepted_then_deltas_then_one_finish() -> None:
    async with running_service() as service:
        events = await collect(service, GenerationRequest(TextPrompt("hello"), max_tokens=12))
    assert isinstance(events[0], Accepted)
    assert events[0].prompt_tokens == 5
    assert all(isinstance(event, Delta) for event in events[1:-1])
    assert text_of(events) == "hellohellohe"
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (5, 12)


async def test_a_request_that_does_not_stream_gets_one_delta_for_each_output() -> None:
    async with running_service() as service:
        request = GenerationRequest(TextPrompt("abc"), max_tokens=7, streaming=False, num_return_sequences=3)
        events = await collect(service, request)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert sorted(delta.output_index for delta in deltas) == [0, 1, 2]
    assert {delta.text for delta in deltas} == {"abcabca"}
    assert len(finishes(events)) == 3


async def test_outputs_of_a_seeded_request_have_different_seeds() -> None:
    executor = FakeExecutor()
    async with running_service(executor) as service:
        sampling = SamplingConfig(temperature=1.0, seed=2**64 - 1)
        request = GenerationRequest(TextPrompt("x"), max_tokens=1, sampling_config=sampling, num_return_sequences=3)
        await collect(service, request)
    assert [request.sampling_config.seed for request in executor.requests] == [2**64 - 1, 0, 1]


async def test_without_max_tokens_the_sequence_length_is_the_limit() -> None:
    executor = script([END_ID])
    async with running_service(executor) as service:
        await collect(service, GenerationRequest(TextPrompt("hello")))
    assert executor.requests[0].max_tokens == executor.spec.max_seq_len - 5


async def test_the_end_token_is_not_part_of_the_output() -> None:
    async with running_service(script([*b"ok", END_ID])) as service:
        events = await collect(service, GenerationRequest(TextPrompt("x"), max_tokens=9))
    assert [token for event in events if isinstance(event, Delta) for token in event.token_ids] == list(b"ok")
    assert finishes(events)[0].finish_reason is FinishReason.END_ID
    assert finishes(events)[0].stop_match == StopMatch(end_id=END_ID)
    assert finishes(events)[0].usage.completion_tokens == 2


async def test_ignore_eos_goes_on_after_the_end_token() -> None:
    async with running_service(script([*b"ok", END_ID, *b"more"])) as service:
        events = await collect(service, GenerationRequest(TextPrompt("x"), max_tokens=7, ignore_eos=True))
    assert text_of(events) == "okmore"
    assert finishes(events)[0].finish_reason is FinishReason.LENGTH


async def test_every_end_token_of_a_model_ends_the_output_as_one() -> None:
    executor = script([*b"ok", START_ID])
    service = GenerationService(executor, load_byte_tokenizer(), end_ids=(END_ID, START_ID))
    events = await collect(service, GenerationRequest(TextPrompt("x"), max_tokens=9))
    service.close()
    executor.shutdown()
    assert finishes(events)[0].finish_reason is FinishReason.END_ID
    assert finishes(events)[0].stop_match == StopMatch(end_id=START_ID)


async def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    async with running_service(script([*b"ab.c"])) as service:
        request = GenerationRequest(TextPrompt("x"), max_tokens=9, stop_token_ids=[ord(".")])
        events = await collect(service, request)
    assert text_of(events) == "ab."
    assert finishes(events)[0].finish_reason is FinishReason.STOP_WORDS
    assert finishes(events)[0].stop_match == StopMatch(stop_token_id=ord("."))


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_ends_the_output_and_cancels_it_in_the_executor(include_stop: bool, text: str) -> None:
    executor = script([*b"one STOP two three"])
    async with running_service(executor) as service:
        request = GenerationRequest(
            TextPrompt("x"), max_tokens=1000, stop_strings=["nothing", "STOP"], include_stop=include_stop
        )
        events = await collect(service, request)
    assert text_of(events) == text
    assert finishes(events)[0].finish_reason is FinishReason.STOP_WORDS
    assert finishes(events)[0].stop_match == StopMatch(stop_string="STOP")
    assert finishes(events)[0].usage.completion_tokens == len("one STOP")
    assert executor.cancelled == [1]
    assert executor.num_unfinished_requests == 0


async def test_text_held_back_for_a_stop_string_comes_when_the_output_ends() -> None:
    async with running_service(script([*b"the EN", END_ID])) as service:
        events = await collect(service, GenerationRequest(TextPrompt("x"), max_tokens=50, stop_strings=["END"]))
    assert text_of(events) == "the EN"
    assert finishes(events)[0].finish_reason is FinishReason.END_ID


@given(st.text(min_size=1, max_size=30), st.booleans())
def test_joined_deltas_are_the_text_of_the_tokens(said: str, streaming: bool) -> None:
    """Streamed text once lost spaces and split characters at token boundaries."""
    tokens = list(said.encode())

    async def run() -> str:
        async with running_service(script([*tokens, END_ID])) as service:
            request = GenerationRequest(TextPrompt("x"), max_tokens=1000, streaming=streaming)
            return text_of(await collect(service, request))

    assert asyncio.run(run()) == said


async def test_log_probs_come_with_their_tokens() -> None:
    async with running_service() as service:
        request = GenerationRequest(TextPrompt("abc"), max_tokens=5, return_log_probs=True)
        events = await collect(service, request)
    for delta in (event for event in events if isinstance(event, Delta)):
        assert delta.log_probs == [TokenLogProb(-0.25)] * len(delta.token_ids)


async def test_a_chat_prompt_is_rendered_with_the_template() -> None:
    executor = FakeExecutor()
    async with running_service(executor) as service:
        chat = ChatPrompt([ChatMessage("system", "Be kind."), ChatMessage("user", "Hi")])
        await collect(service, GenerationRequest(chat, max_tokens=1))
    rendered = "system\nBe kind.", "\n", "user\nHi", "\n", "assistant\n"
    expected = [START_ID, *rendered[0].encode(), END_ID, 10, START_ID, *rendered[2].encode(), END_ID, 10]
    assert executor.requests[0].input_token_ids == [*expected, START_ID, *rendered[4].encode()]


BAD_REQUESTS = {
    "an empty text": (GenerationRequest(TextPrompt("")), "text"),
    "a lone surrogate": (GenerationRequest(TextPrompt("a\ud800")), "text"),
    "no tokens": (GenerationRequest(TokenPrompt([])), "input_token_ids"),
    "a token out of range": (GenerationRequest(TokenPrompt([1, 9999])), "input_token_ids"),
    "no messages": (GenerationRequest(ChatPrompt([])), "chat.messages"),
    "a refused role": (GenerationRequest(ChatPrompt([ChatMessage("tool", "x")])), "chat.messages"),
    "max_tokens 0": (GenerationRequest(TextPrompt("x"), max_tokens=0), "max_tokens"),
    "a long prompt": (GenerationRequest(TextPrompt("x" * 4097)), "input_token_ids"),
    "too many tokens": (GenerationRequest(TextPrompt("x"), max_tokens=8192), "max_tokens"),
    "an empty id": (GenerationRequest(TextPrompt("x"), request_id=""), "request_id"),
    "a long id": (GenerationRequest(TextPrompt("x"), request_id="i" * 129), "request_id"),
    "an empty stop": (GenerationRequest(TextPrompt("x"), stop_strings=["a", ""]), "stop_strings[1]"),
    "many stop tokens": (GenerationRequest(TextPrompt("x"), stop_token_ids=[1] * 1025), "stop_token_ids"),
    "many bad words": (GenerationRequest(TextPrompt("x"), bad_words=[[1]] * 1025), "bad_words"),
    "a long bad word": (GenerationRequest(TextPrompt("x"), bad_words=[[1] * 65]), "bad_words[0]"),
    "a long tenant": (GenerationRequest(TextPrompt("x"), tenant="t" * 129), "tenant"),
    "many stops": (GenerationRequest(TextPrompt("x"), stop_strings=["a"] * 17), "stop_strings"),
    "no outputs": (GenerationRequest(TextPrompt("x"), num_return_sequences=0), "num_return_sequences"),
    "top without log probs": (
        GenerationRequest(TextPrompt("x"), num_top_log_probs=1),
        "output_config.num_top_log_probs",
    ),
    "a negative temperature": (
        GenerationRequest(TextPrompt("x"), sampling_config=SamplingConfig(temperature=-1.0)),
        "sampling_config.temperature",
    ),
    "a high priority": (GenerationRequest(TextPrompt("x"), priority=1.5), "priority"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_names_its_field_each_time_and_the_next_good_one_works(name: str) -> None:
    """Bad limits once killed the engine, some at the second request only."""
    request, field = BAD_REQUESTS[name]
    async with running_service() as service:
        for _ in range(2):
            with pytest.raises(InvalidRequestError) as caught:
                await service.start(request)
            assert caught.value.field == field
        assert text_of(await collect(service, GenerationRequest(TextPrompt("ok"), max_tokens=2))) == "ok"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(TextPrompt("a" * 1_000_000), "text"), (ChatPrompt([ChatMessage("user", "a" * 1_000_000)]), "chat")],
)
async def test_text_that_no_tokens_could_make_short_enough_is_refused_before_it_is_tokenized(
    prompt: TextPrompt | ChatPrompt, field: str
) -> None:
    """Three megabytes of spaces once kept every other request waiting for four seconds."""
    async with running_service() as service:
        with pytest.raises(InvalidRequestError, match=rf"^{field} has 1\d+ bytes; the engine") as caught:
            await service.start(GenerationRequest(prompt))
        assert caught.value.field == field


class WaitingTokenizer:
    """Tokenizes long texts only when it is let."""

    max_token_bytes = 1

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.is_asked = threading.Event()

    def encode(self, text: str) -> list[int]:
        if len(text) > 3000:
            self.is_asked.set()
            assert self.may_go_on.wait(30)
        return [ord(character) for character in text]

    def incremental_decoder(self) -> None:
        return None


async def test_a_long_prompt_holds_up_no_other_request_while_it_is_tokenized() -> None:
    tokenizer = WaitingTokenizer()
    async with running_service(tokenizer=tokenizer) as service:
        long = asyncio.create_task(collect(service, GenerationRequest(TextPrompt("x" * 3500), max_tokens=2)))
        assert await asyncio.to_thread(tokenizer.is_asked.wait, 30)
        assert finishes(await collect(service, GenerationRequest(TextPrompt("short"), max_tokens=2)))
        tokenizer.may_go_on.set()
        assert finishes(await long)[0].usage.prompt_tokens == 3500


async def test_an_id_that_is_taken_while_a_prompt_is_tokenized_is_refused_all_the_same() -> None:
    tokenizer = WaitingTokenizer()
    executor = FakeExecutor()
    executor.hold()
    async with running_service(executor, tokenizer) as service:
        request = GenerationRequest(TextPrompt("x" * 3500), max_tokens=2, request_id="job")
        late = asyncio.create_task(collect(service, request))
        assert await asyncio.to_thread(tokenizer.is_asked.wait, 30)
        with await service.start(GenerationRequest(TextPrompt("short"), request_id="job")):
            tokenizer.may_go_on.set()
            with pytest.raises(DuplicateRequestError, match="job"):
                await late
    assert len(executor.requests) == 1


async def test_a_drain_that_begins_while_a_prompt_is_tokenized_refuses_it() -> None:
    tokenizer = WaitingTokenizer()
    executor = FakeExecutor()
    async with running_service(executor, tokenizer) as service:
        late = asyncio.create_task(collect(service, GenerationRequest(TextPrompt("x" * 3500), max_tokens=2)))
        assert await asyncio.to_thread(tokenizer.is_asked.wait, 30)
        await service.drain(0)
        tokenizer.may_go_on.set()
        with pytest.raises(ExecutorShutDownError, match="draining"):
            await late
    assert not executor.requests


async def test_without_a_tokenizer_only_token_ids_are_taken() -> None:
    async with running_service(tokenizer=None) as service:
        for request, field in (
            (GenerationRequest(TextPrompt("x")), "text"),
            (GenerationRequest(ChatPrompt([ChatMessage("user", "x")])), "chat"),
            (GenerationRequest(TokenPrompt([1]), stop_strings=["x"]), "stop_strings"),
        ):
            with pytest.raises(UnsupportedFeatureError) as caught:
                await service.start(request)
            assert caught.value.field == field
        events = await collect(service, GenerationRequest(TokenPrompt([1, 2]), max_tokens=3))
    assert [token for event in events if isinstance(event, Delta) for token in event.token_ids] == [1, 2, 1]


async def test_without_a_chat_template_chat_is_not_offered() -> None:
    async with running_service(tokenizer=load_byte_tokenizer(chat_template=None)) as service:
        with pytest.raises(UnsupportedFeatureError) as caught:
            await service.start(GenerationRequest(ChatPrompt([ChatMessage("user", "x")])))
    assert caught.value.field == "chat"


async def test_a_live_id_is_taken_and_free_again_after_the_end() -> None:
    """Output of an ended request was once attributed to the next one with its id."""
    executor = FakeExecutor()
    executor.hold()
    async with running_service(executor) as service:
        request = GenerationRequest(TextPrompt("x"), max_tokens=3, request_id="mine")
        with await service.start(request) as first:
            with pytest.raises(DuplicateRequestError) as caught:
                await service.start(request)
            assert caught.value.code is ErrorCode.ALREADY_EXISTS
            executor.release()
            assert len(finishes([event async for event in first])) == 1
        assert text_of(await collect(service, request)) == "xxx"


async def test_abort_takes_the_exact_id_only() -> None:
    """Aborting by prefix once killed siblings."""
    executor = FakeExecutor()
    executor.hold()
    async with running_service(executor) as service:
        with (
            await service.start(GenerationRequest(TextPrompt("x"), max_tokens=2, request_id="job")) as short,
            await service.start(GenerationRequest(TextPrompt("x"), max_tokens=2, request_id="job-1")) as long,
        ):
            assert not service.abort("jo")
            assert service.abort("job")
            executor.release()
            assert finishes([event async for event in short])[0].finish_reason is FinishReason.CANCELLED
            assert finishes([event async for event in long])[0].finish_reason is FinishReason.LENGTH
            assert not service.abort("job")


async def test_an_abort_after_the_last_token_leaves_the_finish_as_it_was() -> None:
    async with running_service() as service:
        request = GenerationRequest(TextPrompt("x"), max_tokens=1, request_id="done")
        with await service.start(request) as stream:
            while stream.num_open_outputs:
                await asyncio.sleep(0)
            assert not service.abort("done")
            assert [finish.finish_reason for finish in finishes([event async for event in stream])] == [
                FinishReason.LENGTH
            ]


async def test_leaving_the_stream_cancels_what_has_not_ended() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running_service(executor) as service:
        with await service.start(GenerationRequest(TextPrompt("x"), max_tokens=8000, num_return_sequences=2)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        assert service.num_live_requests == 0
        assert executor.num_unfinished_requests == 0
        assert sorted(executor.cancelled) == [1, 2]


async def test_a_queue_bound_refuses_all_outputs_of_a_request_or_none() -> None:
    executor = FakeExecutor(max_queue_size=3)
    executor.hold()
    async with running_service(executor) as service:
        with await service.start(GenerationRequest(TextPrompt("x"), max_tokens=1, num_return_sequences=2)):
            with pytest.raises(QueueFullError):
                await service.start(GenerationRequest(TextPrompt("x"), max_tokens=1, num_return_sequences=2))
            assert executor.num_unfinished_requests == 2
            assert service.num_live_requests == 1


async def test_an_engine_failure_ends_its_requests_with_the_error_and_no_other() -> None:
    def only_bad_ones_fail(request: Request, _position: int) -> int:
        return request.input_token_ids[0]

    executor = FakeExecutor(only_bad_ones_fail, fail_at=5)
    async with running_service(executor) as service:
        bad = GenerationRequest(TextPrompt("x"), max_tokens=50, num_return_sequences=2)
        with pytest.raises(EngineStepError):
            await collect(service, bad)
        assert service.num_live_requests == 0
        assert text_of(await collect(service, GenerationRequest(TextPrompt("y"), max_tokens=5))) == "yyyyy"


async def test_draining_takes_no_new_requests_and_cancels_what_outlasts_it() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running_service(executor) as service:
        with await service.start(GenerationRequest(TextPrompt("x"), max_tokens=8000)) as stream:
            draining = asyncio.create_task(service.drain(0.05))
            await asyncio.sleep(0)
            with pytest.raises(ExecutorShutDownError):
                await service.start(GenerationRequest(TextPrompt("y")))
            assert finishes([event async for event in stream])[0].finish_reason is FinishReason.CANCELLED
        await draining


async def test_a_reader_that_takes_nothing_for_too_long_loses_its_request() -> None:
    executor = FakeExecutor(step_seconds=0.001)

    async def stuck(service: GenerationService) -> None:
        with await service.start(GenerationRequest(TextPrompt("x"), max_tokens=8000)) as stream:
            async for _ in stream:
                await asyncio.sleep(3600)

    async with running_service(executor, slow_reader_seconds=0.05) as service:
        reader = asyncio.create_task(stuck(service))
        with pytest.raises(QueueFullError, match=r"took no events for 0\.05 s"):
            await asyncio.wait_for(reader, 5)
        assert executor.num_unfinished_requests == 0
        assert not reader.cancelled()


async def test_a_reader_that_waits_for_a_slow_engine_keeps_its_request() -> None:
    executor = FakeExecutor()
    async with running_service(executor, slow_reader_seconds=0.05) as service:
        executor.hold()
        reader = asyncio.create_task(collect(service, GenerationRequest(TextPrompt("x"), max_tokens=2)))
        await asyncio.sleep(0.3)
        executor.release()
        assert text_of(await reader) == "xx"


async def test_a_slow_reader_finds_waiting_deltas_joined() -> None:
    async with running_service() as service:
        with await service.start(GenerationRequest(TextPrompt("abc"), max_tokens=300)) as stream:
            while stream.num_open_outputs:
                await asyncio.sleep(0)
            events = [event async for event in stream]
    assert [type(event) for event in events] == [Accepted, Delta, Finished]
    assert text_of(events) == "abc" * 100


async def test_many_requests_that_leave_at_any_moment_leave_nothing_behind() -> None:
    executor = FakeExecutor()
    async with running_service(executor) as service:

        async def leave_after(count: int) -> None:
            with await service.start(GenerationRequest(TextPrompt("abc"), max_tokens=40)) as stream:
                seen = 0
                async for event in stream:
                    seen += isinstance(event, Delta)
                    if seen >= count:
                        return

        await asyncio.gather(
            *(leave_after(count) for count, _ in zip(itertools.cycle(range(9)), range(200), strict=False))
        )
        assert service.num_live_requests == 0
        assert executor.num_unfinished_requests == 0
