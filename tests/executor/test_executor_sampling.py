"""Each sampling option of a request reaches the sampler."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from executor import FinishReason, InvalidRequestError, KvCacheConfig, SamplingConfig
from tests.executor.driving import OpenExecutor, request, run, run_one

PROMPT = [3, 4, 5]


def test_options_change_what_they_are_about(open_executor: OpenExecutor) -> None:
    executor = open_executor()

    def tokens(max_tokens: int = 40, **fields: Any) -> list[int]:
        return run_one(executor, request(PROMPT, max_tokens, **fields)).output_token_ids[0]

    plain = tokens()
    first, second = plain[:2]
    assert first not in tokens(bad_words=[[first]])
    assert (first, second) not in list(pairwise(tokens(bad_words=[[first, second]])))
    bias = np.zeros(128, np.float32)
    bias[77] = 1e6
    assert set(tokens(embedding_bias=bias)) == {77}
    assert tokens(sampling_config=SamplingConfig(top_k=1, temperature=2.0)) == plain
    without_repeats = tokens(sampling_config=SamplingConfig(no_repeat_ngram_size=1))
    assert max(Counter([*PROMPT, *without_repeats]).values()) == 1
    for penalty in ({"repetition_penalty": 50.0}, {"presence_penalty": 50.0}, {"frequency_penalty": 50.0}):
        config = SamplingConfig(**penalty)
        assert len(set(tokens(sampling_config=config))) > len(set(plain))
    sampled = tokens(sampling_config=SamplingConfig(temperature=3.0, seed=1))
    assert sampled != plain
    assert tokens(sampling_config=SamplingConfig(temperature=3.0, seed=1)) == sampled
    assert tokens(sampling_config=SamplingConfig(temperature=3.0, seed=1, min_p=1.0)) == plain
    assert tokens(sampling_config=SamplingConfig(temperature=3.0, seed=1, top_p=1e-6)) == plain


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_the_most_extreme_factors_and_penalties_that_are_taken_give_answers(
    open_executor: OpenExecutor, factor: float
) -> None:
    executor = open_executor()
    plain = run_one(executor, request(PROMPT, 20)).output_token_ids[0]
    for temperature in (None, 1e-6, 1e4):
        for sign in (1, -1):
            config = SamplingConfig(
                temperature=temperature,
                repetition_penalty=factor,
                presence_penalty=sign * 1e4,
                frequency_penalty=sign * 1e4,
            )
            assert len(run_one(executor, request(PROMPT, 20, sampling_config=config)).output_token_ids[0]) == 20
    coldest = SamplingConfig(temperature=1e-6, seed=1)
    assert run_one(executor, request(PROMPT, 20, sampling_config=coldest)).output_token_ids[0] == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-308},
        {"temperature": 1e308},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 1e308},
        {"presence_penalty": -1e308},
        {"frequency_penalty": 1e308},
    ],
)
def test_factors_and_penalties_that_float32_cannot_bear_are_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingConfig(**fields).validate()
    assert caught.value.field == f"sampling_config.{next(iter(fields))}"


def test_neither_the_end_id_nor_stop_words_end_an_output_before_its_minimum(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    plain = run_one(executor, request(PROMPT, 30)).output_token_ids[0]
    for ends in ({"end_id": plain[2]}, {"stop_words": [[plain[2]]]}, {"stop_words": [plain[1:3]]}):
        early = run_one(executor, request(PROMPT, 30, **ends))
        late = run_one(executor, request(PROMPT, 30, sampling_config=SamplingConfig(min_tokens=12), **ends))
        assert len(early.output_token_ids[0]) == 3
        assert early.finish_reasons[0] in (FinishReason.END_ID, FinishReason.STOP_WORDS)
        assert len(late.output_token_ids[0]) >= 12


def test_one_batch_may_mix_requests_with_and_without_each_option(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    options: list[dict[str, Any]] = [
        {},
        {"sampling_config": SamplingConfig(temperature=1.0, seed=1)},
        {"sampling_config": SamplingConfig(top_k=5, top_p=0.9, top_p_decay=0.9, seed=2)},
        {"sampling_config": SamplingConfig(repetition_penalty=1.2, no_repeat_ngram_size=3)},
        {"bad_words": [[7], [8, 9]], "stop_words": [[10, 11], [12]]},
        {"output": {"return_log_probs": True, "num_top_log_probs": 5}},
        {"output": {"return_generation_logits": True}, "embedding_bias": np.linspace(0, 1, 128)},
    ]
    alone = [run_one(executor, request(PROMPT, 20, **fields)).output_token_ids for fields in options]
    together = run(executor, *(request(PROMPT, 20, **fields) for fields in options))
    assert [responses[-1].result.output_token_ids for responses in together] == alone


@pytest.mark.parametrize("limit", [5.0, 1])
def test_a_time_limit_that_is_no_timedelta_is_refused_by_name(open_executor: OpenExecutor, limit: Any) -> None:
    executor = open_executor()
    request_id = executor.enqueue_request(request(PROMPT))
    with pytest.raises(ValueError, match=r"timeout is .*; it must be a timedelta, or None"):
        executor.await_responses(request_id, limit)
    assert executor.await_responses(request_id)


def test_the_same_prompt_several_times_in_one_batch_gives_the_same_answer_every_time(
    open_executor: OpenExecutor,
) -> None:
    executor = open_executor(deterministic=True, kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    output = {"return_log_probs": True}
    others = [request([9 + index], 5 + index) for index in range(6)]
    for _ in range(2):
        answers = run(executor, *(request([3, 4, 5, 6], 16, output=output) for _ in range(4)), *others)[:4]
        found = {(tuple(each[-1].result.output_token_ids[0]), tuple(each[-1].result.log_probs[0])) for each in answers}
        assert len(found) == 1


def test_an_output_that_nothing_ends_is_bounded_by_max_tokens(open_executor: OpenExecutor) -> None:
    result = run_one(open_executor(), request([3, 4], 200, end_id=-1))
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert len(result.output_token_ids[0]) == 200
