"""What a request can ask about its prompt: logits and log probabilities at each position."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import (
    CapacitySchedulerPolicy,
    Executor,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from executor.context_logits import ContextLogits
from tests.executor.driving import OpenExecutor, finish, request, run, run_one
from tests.executor.tiny_engine import transformers_logits, transformers_model

CONTEXT = {"return_context_logits": True, "return_generation_logits": True, "return_prompt_log_probs": True}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 128) for _ in range(source.randint(1, 40))] for _ in range(count)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_context_logits_are_those_of_the_whole_prompt_in_one_pass(open_executor: OpenExecutor) -> None:
    from tests.engine_build.tiny_checkpoint import TinyCheckpoint

    model = transformers_model(TinyCheckpoint())
    wanted = [request(prompt, 3, output=CONTEXT) for prompt in prompts(8)]
    for max_num_tokens in (64, 7):
        executor = open_executor(max_num_tokens=max_num_tokens, max_batch_size=4)
        for each, responses in zip(wanted, run(executor, *wanted), strict=True):
            result = responses[-1].result
            assert result.context_logits is not None
            assert result.context_logits.shape == (len(each.input_token_ids), 128)
            np.testing.assert_allclose(
                result.context_logits, transformers_logits(model, each.input_token_ids), atol=2e-4
            )


def test_prompt_log_probs_are_those_of_the_context_logits(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_num_tokens=16)
    for prompt in [[5], *prompts(5)]:
        result = run_one(executor, request(prompt, 2, output=CONTEXT))
        assert result.context_logits is not None
        expected = log_softmax(result.context_logits)[np.arange(len(prompt) - 1), prompt[1:]]
        assert result.prompt_log_probs is not None
        np.testing.assert_allclose(result.prompt_log_probs, expected, atol=1e-5)
        alone = run_one(executor, request(prompt, 2, output={"return_prompt_log_probs": True}))
        assert alone.context_logits is None
        assert alone.prompt_log_probs == pytest.approx(result.prompt_log_probs, abs=1e-5)


def test_asking_for_context_changes_no_token_and_the_last_row_is_what_the_first_token_was_drawn_from(
    open_executor: OpenExecutor,
) -> None:
    executor = open_executor(max_num_tokens=9)
    for prompt in prompts(4):
        plain = run_one(executor, request(prompt))
        asked = run_one(executor, request(prompt, output=CONTEXT))
        assert asked.output_token_ids == plain.output_token_ids
        assert asked.context_logits is not None
        assert asked.generation_logits is not None
        np.testing.assert_allclose(asked.context_logits[-1], asked.generation_logits[0, 0], atol=1e-5)


def test_nothing_of_the_prompt_is_reused_or_offered_to_others(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    prompt = prompts(1, seed=3)[0] * 3
    for _ in range(2):
        result = run_one(executor, request(prompt, output=CONTEXT))
        assert result.context_logits is not None
        assert result.usage.reused_tokens == 0
    assert run_one(executor, request(prompt)).usage.reused_tokens == 0
    assert run_one(executor, request(prompt)).usage.reused_tokens > 0
    again = run_one(executor, request(prompt, output=CONTEXT))
    assert again.usage.reused_tokens == 0
    assert again.context_logits is not None


def test_context_logits_survive_forced_pauses(open_executor: OpenExecutor) -> None:
    wanted = [request(prompt, 40, output=CONTEXT) for prompt in prompts(12)]
    expected = [responses[-1].result.context_logits for responses in run(open_executor(), *wanted)]
    small = open_executor(
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=160),
        max_num_tokens=16,
    )
    for logits, responses in zip(expected, run(small, *wanted), strict=True):
        assert logits is not None
        np.testing.assert_allclose(responses[-1].result.context_logits, logits, atol=1e-4)
    stats = [each.inflight_batching_stats for each in small.get_latest_iteration_stats()]
    assert sum(each.num_paused_requests for each in stats if each) > 0, "the pool was too large to force a pause"


def test_every_streamed_result_and_every_sequence_carries_the_context(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    several = request(
        [3, 4, 5, 6],
        4,
        streaming=True,
        num_return_sequences=2,
        sampling_config=SamplingConfig(temperature=1.0, seed=1),
        output=CONTEXT,
    )
    responses = finish(executor, executor.enqueue_request(several))
    assert {each.result.sequence_index for each in responses} == {0, 1}
    for each in responses:
        assert each.result.context_logits is not None
        assert each.result.context_logits.shape == (4, 128)
        assert each.result.generation_logits is not None
        assert each.result.generation_logits.shape == (1, 1, 128)
        each.clear_context_logits()
        each.clear_generation_logits()
        assert each.result.context_logits is None
        assert each.result.generation_logits is None


def test_context_logits_go_together_with_speculation_and_deterministic_mode(open_executor: OpenExecutor) -> None:
    looping = [5, 6, 7, 8] * 6
    config = {"deterministic": True}
    plain = run_one(open_executor(**config), request(looping, 40, output=CONTEXT))
    drafted = run_one(
        open_executor(**config), request(looping, 40, output=CONTEXT, lookahead_config=LookaheadDecodingConfig())
    )
    np.testing.assert_array_equal(plain.context_logits, drafted.context_logits)
    np.testing.assert_array_equal(plain.generation_logits, drafted.generation_logits)


def test_streaming_all_tokens_repeats_their_logits_token_by_token(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    every = request(
        [3, 4], 3, streaming=True, return_all_generated_tokens=True, output={"return_generation_logits": True}
    )
    shapes = [each.result.generation_logits.shape for each in finish(executor, executor.enqueue_request(every))]
    assert shapes == [(1, 1, 128), (2, 1, 128), (3, 1, 128)]


def test_a_request_cancelled_before_its_prompt_is_computed_has_no_context(open_executor: OpenExecutor) -> None:
    executor: Executor = open_executor(max_batch_size=1)
    blocker = executor.enqueue_request(request([3] * 20, 200))
    queued = executor.enqueue_request(Request([4, 5], 4, output_config=request([1], output=CONTEXT).output_config))
    executor.cancel_request(queued)
    result = finish(executor, queued)[-1].result
    assert result.context_logits is None
    assert result.prompt_log_probs is None
    executor.cancel_request(blocker)


@given(
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    chunks=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=8),
)
def test_chunks_of_any_size_that_overlap_give_the_same_as_one(prompt: list[int], chunks: list[tuple[int, int]]) -> None:
    logits = np.random.default_rng(len(prompt)).normal(size=(15, 8)).astype(np.float32)
    whole = ContextLogits(prompt, 8, wants_logits=True, wants_log_probs=True)
    whole.add(0, logits)
    assert whole.is_complete
    assert whole.log_probs is not None
    assert len(whole.log_probs) == len(prompt) - 1
    parts = ContextLogits(prompt, 8, wants_logits=True, wants_log_probs=True)
    for start, size in [*chunks, (0, 15)]:
        begin = min(start, parts.num_collected)
        parts.add(begin, logits[begin : begin + size])
        assert parts.num_collected <= len(prompt)
        assert parts.log_probs == whole.log_probs[: parts.num_collected]
    assert parts.is_complete
    np.testing.assert_array_equal(parts.logits, whole.logits)


def test_rows_that_are_known_or_behind_the_prompt_are_passed_over() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    context = ContextLogits([1, 2, 3, 4], 16, wants_logits=True, wants_log_probs=True)
    context.add(0, logits[:2])
    assert not context.is_complete
    context.add(1, logits[1:2])
    assert context.num_collected == 2
    with pytest.raises(ValueError, match="positions 2 to 2"):
        context.add(3, logits[3:])
    context.add(1, logits[1:])
    assert context.is_complete
    np.testing.assert_array_equal(context.logits, logits[:4])
    np.testing.assert_allclose(context.log_probs, log_softmax(logits)[[0, 1, 2], [2, 3, 4]], atol=1e-6)
    context.add(0, logits)
    np.testing.assert_array_equal(context.logits, logits[:4])
