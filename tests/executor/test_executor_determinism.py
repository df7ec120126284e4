"""Deterministic mode: tokens, log probabilities and logits are the same numbers however a request was computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    Executor,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.driving import finish, request, run, run_one

OUTPUT = {"return_log_probs": True, "num_top_log_probs": 2, "return_generation_logits": True}
NUM_REQUESTS = 32


class Answer(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    logits: bytes


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = TinyCheckpoint(tiny_config())
    target = select_target("reference")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=NUM_REQUESTS, max_num_tokens=256, max_seq_len=256, tokens_per_block=4
    )
    directory = tmp_path_factory.mktemp("engines") / "wide"
    build_engine(checkpoint, build_config, target, directory, lambda *_: None)
    return directory


def answers(engine_dir: Path, wanted: list[Request], **config: Any) -> Iterator[Answer]:
    with Executor(engine_dir, ExecutorConfig(deterministic=True, **config)) as executor:
        for responses in run(executor, *wanted):
            yield answer_of(responses[-1].result)


def answer_of(result: Any) -> Answer:
    logits = np.ascontiguousarray(result.generation_logits)
    return Answer(result.output_token_ids[0], result.log_probs[0], result.top_log_probs, logits.tobytes())


def mixed_requests() -> list[Request]:
    """Greedy and seeded ones, short and long, some of which repeat themselves."""
    source = random.Random(4)
    requests = []
    for index in range(NUM_REQUESTS):
        prompt = [source.randrange(3, 128) for _ in range(source.randint(1, 40))]
        if index % 4 == 0:
            prompt = prompt[:3] * 8
        sampling = SamplingConfig(temperature=1.0, top_k=30, seed=index) if index % 2 else SamplingConfig()
        requests.append(request(prompt, source.randint(8, 30), sampling_config=sampling, output=OUTPUT))
    return requests


@pytest.fixture(scope="module")
def alone(engine_dir: Path) -> list[Answer]:
    with Executor(engine_dir, ExecutorConfig(deterministic=True)) as executor:
        return [answer_of(run_one(executor, each)) for each in mixed_requests()]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="in a batch of 32"),
        pytest.param({"max_num_tokens": 32, "max_batch_size": 8}, id="in chunks"),
        pytest.param({"max_num_tokens": 5, "max_batch_size": 2}, id="in tiny chunks"),
        pytest.param(
            {
                "max_num_tokens": 24,
                "scheduler_config": SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS),
            },
            id="in chunks of equal progress",
        ),
        pytest.param({"enable_chunked_context": False}, id="without chunks"),
        pytest.param({"kv_cache_config": KvCacheConfig(enable_block_reuse=False)}, id="without reuse"),
    ],
)
def test_answers_are_the_same_numbers_as_alone(engine_dir: Path, alone: list[Answer], config: dict[str, Any]) -> None:
    assert list(answers(engine_dir, mixed_requests(), **config)) == alone


def test_answers_are_the_same_numbers_after_pauses(engine_dir: Path, alone: list[Answer]) -> None:
    config = ExecutorConfig(
        deterministic=True,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=240),
    )
    with Executor(engine_dir, config) as executor:
        assert [answer_of(each[-1].result) for each in run(executor, *mixed_requests())] == alone
        stats = [each.inflight_batching_stats for each in executor.get_latest_iteration_stats()]
    assert sum(each.num_paused_requests for each in stats if each) > 0, "the pool was too large to force a pause"


def with_drafts(alone: list[Answer]) -> list[Request]:
    """The requests with prompt lookup, a third of them with wrong drafts of their own."""
    drafted = mixed_requests()
    for index, (each, answer) in enumerate(zip(drafted, alone, strict=True)):
        each.lookahead_config = LookaheadDecodingConfig()
        if index % 3 == 0:
            wrong_from_third_on = [*answer.token_ids[:2], 3, 4]
            each.external_draft_tokens_config = ExternalDraftTokensConfig(wrong_from_third_on)
    return drafted


def test_answers_are_the_same_numbers_with_speculation(engine_dir: Path, alone: list[Answer]) -> None:
    drafted = with_drafts(alone)
    with Executor(engine_dir, ExecutorConfig(deterministic=True)) as executor:
        assert [answer_of(each[-1].result) for each in run(executor, *drafted)] == alone
        stats = [each.specdec_stats for each in executor.get_latest_iteration_stats()]
    assert sum(each.num_accepted_tokens for each in stats if each) > 20


def test_answers_are_the_same_numbers_with_speculation_alone(engine_dir: Path, alone: list[Answer]) -> None:
    with Executor(engine_dir, ExecutorConfig(deterministic=True)) as executor:
        assert [answer_of(run_one(executor, each)) for each in with_drafts(alone)] == alone


@pytest.mark.parametrize("max_num_tokens", [256, 24])
def test_answers_are_the_same_numbers_with_speculation_chunks_and_pauses_together(
    engine_dir: Path, alone: list[Answer], max_num_tokens: int
) -> None:
    config = ExecutorConfig(
        deterministic=True,
        max_num_tokens=max_num_tokens,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=240),
    )
    with Executor(engine_dir, config) as executor:
        ids = executor.enqueue_requests(with_drafts(alone))
        assert [answer_of(finish(executor, each)[-1].result) for each in ids] == alone
        sequences = [executor.get_receipt(each).sequences[0] for each in ids]
    assert sum(len(each.pauses) for each in sequences) > 0, "the pool was too large to force a pause"
    assert any(each.pauses and each.num_accepted_draft_tokens for each in sequences)


def test_prompt_log_probs_are_the_same_numbers_in_any_chunks_with_reuse_and_in_a_batch(engine_dir: Path) -> None:
    output = {"return_prompt_log_probs": True, "return_context_logits": True}

    def contexts(together: bool, **config: Any) -> list[tuple[list[float] | None, bytes]]:
        requests = [request(each.input_token_ids, 2, output=output) for each in mixed_requests()]
        with Executor(engine_dir, ExecutorConfig(deterministic=True, **config)) as executor:
            results = (
                [each[-1].result for each in run(executor, *requests)]
                if together
                else [run_one(executor, each) for each in requests]
            )
        return [(each.prompt_log_probs, np.ascontiguousarray(each.context_logits).tobytes()) for each in results]

    expected = contexts(False)
    assert sum(len(log_probs or ()) for log_probs, _ in expected) > 300
    for max_num_tokens in (2, 7, 16, 256):
        assert contexts(True, max_num_tokens=max_num_tokens, max_batch_size=min(32, max_num_tokens // 2)) == expected
