"""Ending a request in every state, with every output option: exactly one final response, and nothing held after it.

TensorRT-LLM crashed on some of these combinations: cancelled, streaming, with log probabilities.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import (
    EngineStepError,
    Executor,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    FinishReason,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    LookaheadDecodingConfig,
    Request,
    Response,
    SamplingConfig,
)
from tests.executor.driving import request, run_one, wait_until
from tests.serving.byte_tokenizer import END_ID
from tests.serving.tiny_engine_dir import build_tiny_engine

pytest.importorskip("llguidance")

_GUIDE = GuidedDecodingParams(GuidedDecodingParams.GuideType.REGEX, "[ab]{200}")
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log probs": {"output": {"return_log_probs": True, "num_top_log_probs": 2}},
    "logits": {"output": {"return_generation_logits": True, "return_context_logits": True}},
    "prompt log probs": {"output": {"return_prompt_log_probs": True, "return_perf_metrics": True}},
    "sequences": {"sampling_config": SamplingConfig(temperature=1.0, num_return_sequences=3)},
    "guided": {"guided_decoding_params": _GUIDE, "end_id": END_ID},
    "lookahead": {"lookahead_config": LookaheadDecodingConfig()},
    "drafts": {"external_draft_tokens_config": ExternalDraftTokensConfig([5, 6, 7])},
    "all tokens": {"return_all_generated_tokens": True},
    "everything": {
        "output": {
            "return_log_probs": True,
            "num_top_log_probs": 2,
            "return_generation_logits": True,
            "return_context_logits": True,
            "return_prompt_log_probs": True,
            "return_perf_metrics": True,
        },
        "sampling_config": SamplingConfig(temperature=1.0, num_return_sequences=2),
        "guided_decoding_params": _GUIDE,
        "end_id": END_ID,
        "lookahead_config": LookaheadDecodingConfig(),
        "external_draft_tokens_config": ExternalDraftTokensConfig([97, 98, 97]),
    },
}
_LONG_PROMPT = [3] * 100


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    engine_dir: Path = build_tiny_engine(tmp_path_factory.mktemp("engines") / "bytes", "reference")
    config = ExecutorConfig(
        max_batch_size=3,
        max_num_tokens=8,
        guided_decoding_config=GuidedDecodingConfig(),
        request_stats_max_iterations=10,
    )
    with Executor(engine_dir, config) as opened:
        yield opened


class Heard:
    """Hears one request's responses."""

    def __init__(self) -> None:
        self.responses: list[Response] = []

    def __call__(self, responses: list[Response]) -> None:
        self.responses += responses

    @property
    def finals(self) -> list[Response]:
        return [each for each in self.responses if each.is_final]


def _sequence(executor: Executor, request_id: int) -> Any:
    live = executor._loop._live.by_id.get(request_id)
    return None if live is None else live.sequences[0]


def _has_begun_its_context(executor: Executor, request_id: int) -> bool:
    sequence = _sequence(executor, request_id)
    return sequence is None or sequence.scheduled.num_computed_tokens > 0


def _generates(executor: Executor, request_id: int) -> bool:
    sequence = _sequence(executor, request_id)
    return sequence is None or sequence.scheduled.num_generated_tokens > 2


_STATES: dict[str, Callable[[Executor, int], bool] | None] = {
    "just queued": None,
    "context": _has_begun_its_context,
    "generation": _generates,
}


def wanted(option: str, *, streaming: bool, max_tokens: int = 120) -> Request:
    return request(_LONG_PROMPT, max_tokens, streaming=streaming, **_OPTIONS[option])


def check_ended(executor: Executor, heard: Heard, num_sequences: int) -> None:
    """One final response, the last of all, one end for each sequence, outputs that fit together, and nothing held."""
    wait_until(lambda: bool(heard.finals))
    assert len(run_one(executor, request([9, 8], 3)).output_token_ids[0]) == 3, "others do not run any more"
    assert heard.finals == [heard.responses[-1]]
    if not heard.finals[0].has_error():
        ended = [each.result.sequence_index for each in heard.responses if each.result.is_sequence_final]
        assert sorted(ended) == list(range(num_sequences))
        for response in heard.responses:
            result = response.result
            num_tokens = len(result.output_token_ids[0])
            if result.log_probs is not None:
                assert len(result.log_probs[0]) == num_tokens
                assert result.top_log_probs is not None
                assert len(result.top_log_probs) == num_tokens
            if result.generation_logits is not None:
                assert result.generation_logits.size == num_tokens * executor.spec.vocab_size
    wait_until(lambda: executor.num_unfinished_requests == 0)
    assert executor._batch_manager.num_running == executor._batch_manager.num_waiting == 0
    assert not executor._loop._live.sequences
    assert not executor._loop._step._contexts
    stats = executor._kv.stats()
    assert stats.used_num_blocks == 0
    executor._kv.check_invariants()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("state", _STATES)
@pytest.mark.parametrize("option", _OPTIONS)
def test_cancelling_in_any_state_gives_one_final_response(
    executor: Executor, option: str, state: str, streaming: bool
) -> None:
    is_there = _STATES[state]
    heard = Heard()
    each = wanted(option, streaming=streaming)
    request_id = executor.enqueue_request(each, listener=heard)
    if is_there is not None:
        wait_until(lambda: bool(heard.finals) or is_there(executor, request_id))
    for _ in range(2):
        executor.cancel_request(request_id)
    check_ended(executor, heard, each.num_sequences)
    reasons = {tuple(each.result.finish_reasons) for each in heard.responses if each.result.is_sequence_final}
    assert reasons == {(FinishReason.CANCELLED,)}


@pytest.mark.parametrize("option", _OPTIONS)
def test_timing_out_gives_one_final_response(executor: Executor, option: str) -> None:
    for streaming, milliseconds in itertools.product((False, True), (0, 15)):
        heard = Heard()
        each = wanted(option, streaming=streaming)
        each.allotted_time_ms = milliseconds
        executor.enqueue_request(each, listener=heard)
        check_ended(executor, heard, each.num_sequences)
        assert heard.finals[0].result.finish_reasons == [FinishReason.TIMED_OUT]


@pytest.mark.parametrize("option", _OPTIONS)
def test_ending_by_itself_gives_one_final_response(executor: Executor, option: str) -> None:
    for streaming in (False, True):
        heard = Heard()
        each = wanted(option, streaming=streaming, max_tokens=9)
        executor.enqueue_request(each, listener=heard)
        check_ended(executor, heard, each.num_sequences)
        assert heard.finals[0].result.finish_reasons == [FinishReason.LENGTH]


@pytest.mark.parametrize("option", _OPTIONS)
def test_a_failing_step_gives_one_final_error_and_others_run(
    executor: Executor, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = executor._engine.submit
    num_steps = 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 15:
            raise RuntimeError("device lost")
        return healthy(*arguments)

    monkeypatch.setattr(executor._engine, "submit", failing)
    heard = Heard()
    each = wanted(option, streaming=True)
    executor.enqueue_request(each, listener=heard)
    check_ended(executor, heard, each.num_sequences)
    assert isinstance(heard.finals[0].error, EngineStepError)


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_options_and_endings_gives_each_request_one_final_response(executor: Executor, seed: int) -> None:
    source = random.Random(seed)
    heard: dict[int, Heard] = {}
    for _ in range(40):
        option = source.choice(list(_OPTIONS))
        each = request(
            [source.randrange(256) for _ in range(source.randint(1, 40))],
            source.randint(1, 40),
            streaming=source.random() < 0.5,
            priority=source.random(),
            allotted_time_ms=source.choice([None, None, None, 0, 30, 300]),
            **_OPTIONS[option],
        )
        listener = Heard()
        heard[executor.enqueue_request(each, listener=listener)] = listener
        if source.random() < 0.4:
            executor.cancel_request(source.choice(list(heard)))
        if source.random() < 0.2:
            time.sleep(0.02 * source.random())
    wait_until(lambda: all(listener.finals for listener in heard.values()))
    wait_until(lambda: executor.num_unfinished_requests == 0)
    for listener in heard.values():
        assert listener.finals == [listener.responses[-1]]
        assert not listener.finals[0].has_error()
    assert executor._batch_manager.num_running == executor._batch_manager.num_waiting == 0
    assert executor._kv.stats().used_num_blocks == 0
    executor._kv.check_invariants()


def test_a_request_that_cannot_begin_fails_alone(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = executor._loop._step._sampler.open

    def failing(sequence_id: int, spec: Any) -> None:
        if spec.client_id == 666:
            raise MemoryError("no room")
        healthy(sequence_id, spec)

    monkeypatch.setattr(executor._loop._step._sampler, "open", failing)
    bad, good = Heard(), Heard()
    with executor._loop.batch_manager_lock:
        executor.enqueue_request(request([5, 6], 20, client_id=666), listener=bad)
        executor.enqueue_request(request([5, 7], 20), listener=good)
    check_ended(executor, good, 1)
    assert good.finals[0].result.finish_reasons == [FinishReason.LENGTH]
    check_ended(executor, bad, 1)
    assert isinstance(bad.finals[0].error, EngineStepError)


def test_results_that_cannot_be_handed_on_fail_their_batch_and_not_the_loop(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = executor._loop._drafter.propose

    def failing(*_arguments: Any, **_options: Any) -> Any:
        monkeypatch.setattr(executor._loop._drafter, "propose", healthy)
        raise RuntimeError("lost")

    monkeypatch.setattr(executor._loop._drafter, "propose", failing)
    heard = Heard()
    executor.enqueue_request(wanted("plain", streaming=True), listener=heard)
    check_ended(executor, heard, 1)
    assert isinstance(heard.finals[0].error, EngineStepError)
    assert "lost" in heard.finals[0].error_msg
