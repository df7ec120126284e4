"""Deterministic mode on the real model: the same tokens and log probabilities however they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_build.checkpoint import open_checkpoint
from executor import (
    CapacitySchedulerPolicy,
    Executor,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
    SequenceReceipt,
)
from tests.executor.driving import finish, request, run, run_one
from tests.parity.chat_prompts import chat_token_ids
from tests.parity.smollm2 import Variant, build_smollm2

pytestmark = pytest.mark.model

NUM_OTHERS = 26
NUM_TOKENS = 24
MAX_UTILIZATION = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)


class Answer(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def prompts(demo_model_path: Path) -> list[list[int]]:
    return chat_token_ids(open_checkpoint(demo_model_path))


@pytest.fixture(scope="module")
def engine_dir(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "engine"
    return build_smollm2(demo_model_path, Variant("openvino", "bfloat16"), directory)


def compared(prompts: list[list[int]]) -> list[Request]:
    """Greedy and seeded ones, two of which repeat themselves."""
    repeating = [*prompts[0], *prompts[0][-30:], *prompts[0][-30:]]
    wanted = []
    for index, prompt in enumerate([prompts[0], prompts[1], repeating]):
        for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, top_k=50, seed=index)):
            output = {"return_log_probs": True, "num_top_log_probs": 3}
            wanted.append(request(prompt, NUM_TOKENS, sampling_config=sampling, output=output))
    return wanted


def others(prompts: list[list[int]]) -> list[Request]:
    """Whatever else is in the batch, of other lengths and drawn otherwise."""
    company = [prompts[2 + index % (len(prompts) - 2)][index // 8 :] for index in range(NUM_OTHERS)]
    return [
        request(prompt, NUM_TOKENS - index % 5, sampling_config=SamplingConfig(temperature=1.0, seed=index))
        for index, prompt in enumerate(company)
    ]


def with_drafts(wanted: list[Request], alone: Sequence[Answer]) -> list[Request]:
    """With prompt lookup, and with drafts of their own that are wrong from the third on."""
    for each, answer in zip(wanted, alone, strict=True):
        each.lookahead_config = LookaheadDecodingConfig(8, 4, 8)
        each.external_draft_tokens_config = ExternalDraftTokensConfig([*answer.token_ids[:2], 3, 4])
    return wanted


def answer_of(result: Any) -> Answer:
    return Answer(result.output_token_ids[0], result.log_probs[0], result.top_log_probs)


@pytest.fixture(scope="module")
def alone(engine_dir: Path, prompts: list[list[int]]) -> list[Answer]:
    """Each computed by itself, its prompt in one piece and nothing of it found in the cache."""
    config = ExecutorConfig(deterministic=True, kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    with Executor(engine_dir, config) as executor:
        return [answer_of(run_one(executor, each)) for each in compared(prompts)]


def in_company(
    engine_dir: Path, wanted: list[Request], company: list[Request], **config: Any
) -> tuple[list[Answer], list[SequenceReceipt]]:
    """The answers of `wanted` among `company`, and how each was computed."""
    with Executor(engine_dir, ExecutorConfig(deterministic=True, **config)) as executor:
        all_ids = executor.enqueue_requests([*company, *wanted])  # the last started are paused first
        company_ids, ids = all_ids[: len(company)], all_ids[len(company) :]
        answers = [answer_of(finish(executor, each)[-1].result) for each in ids]
        for each in company_ids:
            finish(executor, each)
        receipts = [executor.get_receipt(each) for each in ids]
    return answers, [receipt.sequences[0] for receipt in receipts if receipt is not None]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="in one go"),
        pytest.param({"max_num_tokens": 64, "max_batch_size": 32}, id="in chunks of 64"),
        pytest.param({"max_num_tokens": 32, "max_batch_size": 16}, id="in chunks of 32"),
        pytest.param({"max_num_tokens": 45, "max_batch_size": 20}, id="in odd chunks"),
        pytest.param({"kv_cache_config": KvCacheConfig(enable_block_reuse=False)}, id="without reuse"),
    ],
)
def test_answers_among_others_are_the_same_numbers_as_alone(
    engine_dir: Path, prompts: list[list[int]], alone: list[Answer], config: dict[str, Any]
) -> None:
    assert in_company(engine_dir, compared(prompts), others(prompts), **config)[0] == alone


def test_answers_from_cached_prefixes_are_the_same_numbers(
    engine_dir: Path, prompts: list[list[int]], alone: list[Answer]
) -> None:
    with Executor(engine_dir, ExecutorConfig(deterministic=True)) as executor:
        run(executor, *compared(prompts))
        ids = executor.enqueue_requests(compared(prompts))
        assert [answer_of(finish(executor, each)[-1].result) for each in ids] == alone
        receipts = [executor.get_receipt(each) for each in ids]
    assert all(receipt is not None and receipt.sequences[0].num_reused_tokens > 0 for receipt in receipts)


def test_answers_that_were_paused_and_resumed_are_the_same_numbers(
    engine_dir: Path, prompts: list[list[int]], alone: list[Answer]
) -> None:
    answers, sequences = in_company(
        engine_dir,
        compared(prompts),
        others(prompts),
        scheduler_config=MAX_UTILIZATION,
        kv_cache_config=KvCacheConfig(max_tokens=60 * 32, enable_block_reuse=False),  # all 32 would grow to 87 blocks
    )
    assert answers == alone
    assert any(each.pauses for each in sequences), "the pool was too large to pause one of those compared"


def test_answers_with_speculation_are_the_same_numbers(
    engine_dir: Path, prompts: list[list[int]], alone: list[Answer]
) -> None:
    with Executor(engine_dir, ExecutorConfig(deterministic=True)) as executor:
        ids = [executor.enqueue_request(each) for each in with_drafts(compared(prompts), alone)]
        assert [answer_of(finish(executor, each)[-1].result) for each in ids] == alone
        receipts = [executor.get_receipt(each) for each in ids]
    sequences = [receipt.sequences[0] for receipt in receipts if receipt is not None]
    assert all(0 < each.num_accepted_draft_tokens < each.num_draft_tokens for each in sequences)


def test_answers_with_speculation_odd_chunks_and_pauses_together_are_the_same_numbers(
    engine_dir: Path, prompts: list[list[int]], alone: list[Answer]
) -> None:
    answers, sequences = in_company(
        engine_dir,
        with_drafts(compared(prompts), alone),
        others(prompts)[:8],
        max_num_tokens=45,
        max_batch_size=20,
        scheduler_config=MAX_UTILIZATION,
        kv_cache_config=KvCacheConfig(max_tokens=28 * 32),  # all 14 would grow to 44 blocks
    )
    assert answers == alone
    assert any(each.pauses and each.num_accepted_draft_tokens for each in sequences)
