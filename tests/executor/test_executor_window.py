"""Sliding windows: blocks that fall out are given back while a request runs, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor import (
    CapacitySchedulerPolicy,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from executor.engines.interface import Engine, PendingLogits, StepInputs
from executor.engines.openvino import OpenVinoEngine
from executor.engines.reference import ReferenceEngine
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.driving import request, run, run_one
from tests.executor.tiny_engine import transformers_logits, transformers_model

WINDOW = 70
BLOCK = 32
"""OpenVINO's; the reference engine takes any."""
CHECKPOINT = TinyCheckpoint(tiny_config(sliding_window=WINDOW))
MOST_BLOCKS = -(-WINDOW // BLOCK) + 2
"""Of the window wherever it begins, and one behind it, since deterministic steps repeat a row."""
KEPT = {"host_cache_size": 1 << 20}
"""Lower tiers take sequences whole, so that with them all blocks stay."""
OUTPUT = {"return_log_probs": True, "num_top_log_probs": 2, "return_generation_logits": True}


@pytest.fixture(scope="module", params=["reference", "openvino"])
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = select_target(request.param)
    build_config = resolve_build_config(
        CHECKPOINT.config,
        target,
        dtype="float32",
        max_batch_size=8,
        max_num_tokens=96,
        max_seq_len=512,
        tokens_per_block=BLOCK,
    )
    directory: Path = tmp_path_factory.mktemp("engines") / request.param
    build_engine(CHECKPOINT, build_config, target, directory, lambda *_: None)
    return directory


def open_executor(engine_dir: Path, kv: dict[str, Any] | None = None, **config: Any) -> Executor:
    return Executor(
        engine_dir, ExecutorConfig(deterministic=True, kv_cache_config=KvCacheConfig(**(kv or {})), **config)
    )


def mixed_requests() -> list[Request]:
    """Prompts shorter and longer than the window, two of which begin alike, greedy and seeded."""
    source = random.Random(1)
    shared = [source.randrange(3, 128) for _ in range(100)]
    requests = []
    for index, length in enumerate((5, 40, WINDOW, 100, 150, 260)):
        prompt = shared[:length] + [source.randrange(3, 128) for _ in range(length - 100)]
        sampling = SamplingConfig(temperature=1.0, seed=index) if index % 2 else SamplingConfig()
        requests.append(request(prompt, 90, sampling_config=sampling, output=OUTPUT))
    return requests


def answers(engine_dir: Path, kv: dict[str, Any] | None = None, **config: Any) -> list[tuple[Any, ...]]:
    with open_executor(engine_dir, kv, **config) as executor:
        results = [responses[-1].result for responses in run(executor, *mixed_requests())]
        return [
            (each.output_token_ids, each.log_probs, each.top_log_probs, np.array(each.generation_logits).tobytes())
            for each in results
        ]


@pytest.fixture(scope="module")
def kept(engine_dir: Path) -> list[tuple[Any, ...]]:
    """Answers of an executor that gives no block back."""
    return answers(engine_dir, KEPT)


@pytest.mark.parametrize(
    ("kv", "config"),
    [
        pytest.param({}, {}, id="together"),
        pytest.param({}, {"max_num_tokens": 33, "max_batch_size": 3}, id="in odd chunks"),
        pytest.param({"enable_block_reuse": False}, {}, id="without reuse"),
        pytest.param(
            {"max_tokens": 17 * BLOCK},
            {"scheduler_config": SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)},
            id="in a pool that is too small for all",
        ),
    ],
)
def test_answers_are_the_same_numbers_as_with_all_blocks_kept(
    engine_dir: Path, kept: list[tuple[Any, ...]], kv: dict[str, Any], config: dict[str, Any]
) -> None:
    assert answers(engine_dir, kv, **config) == kept


def test_greedy_tokens_are_those_of_transformers(engine_dir: Path) -> None:
    prompt = [random.Random(3).randrange(3, 128) for _ in range(50)]
    with open_executor(engine_dir) as executor:
        tokens = run_one(executor, request(prompt, 150)).output_token_ids[0]
    logits = transformers_logits(transformers_model(CHECKPOINT), prompt + tokens)
    for index, token in enumerate(tokens):
        row = logits[len(prompt) + index - 1]
        assert row[token] >= row.max() - 1e-3, f"token {index} is not the most likely one"


def used_blocks(executor: Executor) -> list[int]:
    return [each.kv_cache_stats.used_num_blocks for each in executor.get_latest_iteration_stats()]


def test_a_request_holds_no_more_blocks_than_its_window_has(engine_dir: Path) -> None:
    for kv, holds_all in (({}, False), (KEPT, True)):
        with open_executor(engine_dir, kv) as executor:
            run_one(executor, request([5, 6, 7], 500))
            most = max(used_blocks(executor))
        assert (most == -(-503 // BLOCK)) if holds_all else (most <= MOST_BLOCKS)


def test_a_long_prompt_gives_blocks_back_while_it_is_computed(engine_dir: Path) -> None:
    prompt = [random.Random(4).randrange(3, 128) for _ in range(400)]
    with open_executor(engine_dir, max_num_tokens=32) as executor:
        run_one(executor, request(prompt, 10))
        used = used_blocks(executor)
    assert used[0] == -(-400 // BLOCK)
    assert used[-2] <= MOST_BLOCKS


def test_requests_run_beside_each_other_that_would_not_fit_to_their_ends(engine_dir: Path) -> None:
    wanted = [request([3 + index, 4], 300) for index in range(4)]
    num_running: dict[bool, int] = {}
    for kv, holds_all in (({}, False), (KEPT, True)):
        with open_executor(engine_dir, {"max_tokens": 30 * BLOCK, **kv}) as executor:
            tokens = [each[-1].result.output_token_ids for each in run(executor, *wanted)]
            stats = executor.get_latest_iteration_stats()
        assert all(len(each[0]) == 300 for each in tokens)
        assert sum(each.inflight_batching_stats.num_paused_requests for each in stats) == 0
        num_running[holds_all] = max(each.num_active_requests for each in stats)
    assert num_running == {False: 4, True: 3}


def test_what_was_given_back_is_not_read(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a step does not name, and the ones that were given back among them, hold NaN when it runs."""
    prompts = [[random.Random(seed).randrange(3, 128) for _ in range(60)] for seed in (5, 6)]
    wanted = [request(prompt, 100, lookahead_config=LookaheadDecodingConfig()) for prompt in prompts]
    with open_executor(engine_dir, {"max_tokens": 12 * BLOCK}) as executor:
        expected = [each[-1].result.output_token_ids for each in run(executor, *wanted)]
    for engine in (ReferenceEngine, OpenVinoEngine):
        monkeypatch.setattr(engine, "submit", _poisoning(engine.submit))
    with open_executor(engine_dir, {"max_tokens": 12 * BLOCK}) as executor:
        assert [each[-1].result.output_token_ids for each in run(executor, *wanted)] == expected


def _poisoning(
    submit: Callable[[Any, StepInputs], PendingLogits],
) -> Callable[[Engine, StepInputs], PendingLogits]:
    def poison_and_submit(engine: Engine, inputs: StepInputs) -> PendingLogits:
        nan = np.full(engine.spec.kv_bytes_per_block // 4, np.nan, np.float32).view(np.uint8)
        for block_id in set(range(engine.num_blocks)) - set(inputs.block_indices.tolist()):
            engine.write_block(block_id, nan)
        return submit(engine, inputs)

    return poison_and_submit


def test_events_tell_the_window(engine_dir: Path) -> None:
    with open_executor(engine_dir, {"event_buffer_max_size": 100}) as executor:
        run_one(executor, request([5, 6, 7], 40))
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        assert {event.window_size for event in manager.get_latest_events()} == {WINDOW}
