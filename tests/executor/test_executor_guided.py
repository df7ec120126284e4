"""Guided decoding through the whole Executor: requests wait for their grammars, and follow them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from batch_manager import WaitCode
from executor import (
    CapacitySchedulerPolicy,
    Executor,
    ExecutorConfig,
    ExecutorShutDownError,
    FinishReason,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    InvalidRequestError,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    RequestError,
    SamplingConfig,
    SchedulerConfig,
    SequenceReceipt,
    UnsupportedFeatureError,
)
from tests.executor.driving import OpenExecutor, finish, request, run, tokens_of, wait_until
from tests.serving.byte_tokenizer import END_ID
from tests.serving.tiny_engine_dir import build_tiny_engine

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

GuideType = GuidedDecodingParams.GuideType
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
PARAMS = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
LIST_SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 8}
LIST_PARAMS = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(LIST_SCHEMA))


@pytest.fixture(scope="module")
def byte_engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engines") / "bytes", "reference")


@pytest.fixture
def executor(byte_engine_dir: Path) -> Iterator[Executor]:
    with Executor(byte_engine_dir, ExecutorConfig(guided_decoding_config=GuidedDecodingConfig())) as opened:
        yield opened


class HeldCompiler:
    """Stands before an executor's compiler: lets no grammar through before it is told to."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self._submit = executor._intake._grammars.submit
        self._held: list[tuple[Any, Future[Any]]] = []
        monkeypatch.setattr(executor._intake._grammars, "submit", self.submit)

    def submit(self, params: Any) -> Future[Any]:
        self._held.append((params, Future()))
        return self._held[-1][1]

    def release(self) -> None:
        held, self._held = self._held, []
        for params, future in held:
            try:
                future.set_result(self._submit(params).result())
            except RequestError as error:
                future.set_exception(error)


def guided(prompt: str = "give me json", max_tokens: int = 80, **fields: Any) -> Request:
    fields.setdefault("guided_decoding_params", PARAMS)
    fields.setdefault("end_id", END_ID)
    return request(list(prompt.encode()), max_tokens, **fields)


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def test_outputs_validate_greedy_sampled_drafted_and_with_several_sequences(executor: Executor) -> None:
    wanted = [
        guided(),
        guided(sampling_config=SamplingConfig(temperature=1.5, seed=3)),
        guided(lookahead_config=LookaheadDecodingConfig()),
        guided(sampling_config=SamplingConfig(temperature=1.5, seed=5, num_return_sequences=3)),
        guided(streaming=True),
    ]
    outputs = run(executor, *wanted)
    for responses in [*outputs[:3], outputs[4]]:
        jsonschema.validate(json.loads(text_of(tokens_of(responses))), SCHEMA)
        assert responses[-1].result.finish_reasons == [FinishReason.END_ID]
    for response in outputs[3]:
        jsonschema.validate(json.loads(text_of(response.result.output_token_ids[0])), SCHEMA)
    assert tokens_of(outputs[0]) == tokens_of(outputs[2]), "speculation changed a greedy output"


def test_stop_words_end_an_output_only_where_the_grammar_may_end(executor: Executor) -> None:
    params = GuidedDecodingParams(GuideType.REGEX, "(ab|abab|ababab)x?")
    plain = run(executor, guided(guided_decoding_params=params))[0]
    stopped = run(executor, guided(guided_decoding_params=params, stop_words=[list(b"ab")]))[0]
    assert text_of(tokens_of(plain)) in ("ab", "abab", "ababab", "abx", "ababx", "abababx")
    assert text_of(tokens_of(stopped)) in ("ab", "abab", "ababab")
    assert stopped[-1].result.finish_reasons == [FinishReason.STOP_WORDS]


def lists(**fields: Any) -> list[Request]:
    """Prompts that begin alike, greedy and seeded; outputs have 70 to 110 tokens and repeat themselves. An
    opened string is a stop word, too, but no output may end there."""
    return [
        guided(
            "Name a few colours, in JSON, as a list of strings: " + ending,
            120,
            guided_decoding_params=LIST_PARAMS,
            sampling_config=SamplingConfig(temperature=1.2, seed=index) if index % 2 else SamplingConfig(),
            stop_words=[list(b'"]'), list(b'["')],
            **fields,
        )
        for index, ending in enumerate(("now", "again", "please", "now", "again", "please"))
    ]


def list_outputs(
    engine_dir: Path, wanted: list[Request], *, times: int = 1, **config: Any
) -> tuple[list[list[int]], list[SequenceReceipt]]:
    """The tokens of the last of some `times`, and how they were computed."""
    opened = ExecutorConfig(deterministic=True, guided_decoding_config=GuidedDecodingConfig(), **config)
    with Executor(engine_dir, opened) as executor:
        for _ in range(times):
            ids = executor.enqueue_requests(wanted)
            responses = [finish(executor, each) for each in ids]
        receipts = [executor.get_receipt(each) for each in ids]
    for each in responses:
        jsonschema.validate(json.loads(text_of(tokens_of(each))), LIST_SCHEMA)
        assert each[-1].result.finish_reasons in ([FinishReason.STOP_WORDS], [FinishReason.END_ID])
    return [tokens_of(each) for each in responses], [each.sequences[0] for each in receipts if each is not None]


@pytest.fixture(scope="module")
def plain_lists(byte_engine_dir: Path) -> list[list[int]]:
    tokens, _ = list_outputs(byte_engine_dir, lists(), kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    return tokens


def test_prompts_found_in_the_cache_do_not_change_a_guided_output(
    byte_engine_dir: Path, plain_lists: list[list[int]]
) -> None:
    tokens, sequences = list_outputs(byte_engine_dir, lists(), times=2)
    assert tokens == plain_lists
    assert all(each.num_reused_tokens > 0 for each in sequences)


def test_drafts_pauses_and_stop_words_together_do_not_change_a_guided_output(
    byte_engine_dir: Path, plain_lists: list[list[int]]
) -> None:
    tokens, sequences = list_outputs(
        byte_engine_dir,
        lists(lookahead_config=LookaheadDecodingConfig()),
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=256),
    )
    assert tokens == plain_lists
    assert any(each.pauses and each.num_accepted_draft_tokens for each in sequences)


def test_a_request_waits_for_its_grammar_and_others_run_meanwhile(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = HeldCompiler(executor, monkeypatch)
    held = executor.enqueue_request(guided())
    run(executor, request([5, 6, 7]), request([5, 6, 8]))
    reason = executor.explain_request(held)
    assert reason is not None
    assert reason.code is WaitCode.GRAMMAR
    assert executor.get_num_responses_ready(held) == 0
    compiler.release()
    jsonschema.validate(json.loads(text_of(tokens_of(finish(executor, held)))), SCHEMA)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (GuidedDecodingParams(GuideType.JSON_SCHEMA, "{"), "guide"),
        (GuidedDecodingParams(GuideType.REGEX, "(["), "guide"),
        (GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "root ::= nobody"), "guide"),
    ],
)
def test_a_bad_grammar_fails_its_request_only(executor: Executor, params: GuidedDecodingParams, message: str) -> None:
    with executor._loop.batch_manager_lock:
        good = executor.enqueue_requests([request([5, 6, 7]), guided()])
        bad = executor.enqueue_request(guided(guided_decoding_params=params))
    responses = finish(executor, bad)
    assert len(responses) == 1
    assert isinstance(responses[0].error, InvalidRequestError)
    assert message in responses[0].error_msg
    for each in good:
        assert not finish(executor, each)[-1].has_error()
    assert executor.num_unfinished_requests == 0


def test_an_output_that_nothing_could_end_is_refused(executor: Executor) -> None:
    responses = finish(executor, executor.enqueue_request(guided(end_id=None)))
    assert isinstance(responses[-1].error, InvalidRequestError)
    assert responses[-1].error.field == "end_id"


def test_a_request_that_waits_for_its_grammar_can_be_cancelled_and_can_time_out(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = HeldCompiler(executor, monkeypatch)
    cancelled = executor.enqueue_request(guided(sampling_config=SamplingConfig(num_return_sequences=2)))
    late = executor.enqueue_request(guided(allotted_time_ms=20))
    executor.cancel_request(cancelled)
    assert finish(executor, late)[-1].result.finish_reasons == [FinishReason.TIMED_OUT]
    ended = finish(executor, cancelled)
    assert [each.result.finish_reasons for each in ended] == [[FinishReason.CANCELLED]] * 2
    assert [each.is_final for each in ended] == [False, True]
    compiler.release()
    run(executor, request([5]))
    assert executor.get_num_responses_ready() == 0


def test_shutting_down_ends_requests_that_wait_for_their_grammars(
    byte_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(byte_engine_dir, ExecutorConfig(guided_decoding_config=GuidedDecodingConfig()))
    HeldCompiler(executor, monkeypatch)
    held = executor.enqueue_request(guided())
    executor.shutdown()
    assert isinstance(executor.await_responses(held)[0].error, ExecutorShutDownError)


def test_many_threads_may_bring_the_same_and_other_grammars(executor: Executor) -> None:
    texts: list[tuple[str, str]] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        for choice in ("red", f"blue{number}"):
            params = GuidedDecodingParams(GuideType.REGEX, choice)
            output = finish(executor, executor.enqueue_request(guided(guided_decoding_params=params)))
            with lock:
                texts.append((choice, text_of(tokens_of(output))))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 12
    assert all(text == choice for choice, text in texts)
    wait_until(lambda: executor.num_unfinished_requests == 0)


def test_the_configuration_is_compared_with_the_engine_directorys_tokenizer(byte_engine_dir: Path) -> None:
    def open_with(**fields: Any) -> None:
        Executor(byte_engine_dir, ExecutorConfig(guided_decoding_config=GuidedDecodingConfig(**fields))).shutdown()

    open_with(backend=GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR, stop_token_ids=[END_ID])
    with pytest.raises(InvalidRequestError, match=r"encoded_vocab\[0\] is 'zzz'; .* there is no such token"):
        open_with(encoded_vocab=["zzz"])
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids holds 258; token ids are in \[0, 258\)"):
        open_with(stop_token_ids=[258])


def test_a_guided_request_needs_the_configuration_and_a_tokenizer(open_executor: OpenExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="opened without a guided_decoding_config"):
        open_executor().enqueue_request(request([3], guided_decoding_params=PARAMS, end_id=2))
    with pytest.raises(UnsupportedFeatureError, match="this one has none"):
        open_executor(guided_decoding_config=GuidedDecodingConfig())
