"""The whole Executor on the real model: how a request was batched and chunked does not show in its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_build.checkpoint import open_checkpoint
from executor import Executor, ExecutorConfig, OutputConfig, Request
from tests.parity.chat_prompts import chat_token_ids
from tests.parity.smollm2 import Variant, build_smollm2

pytestmark = pytest.mark.model

NUM_PROMPTS = 20
NUM_TOKENS = 12
WAYS = {
    "all at once": ({}, False),
    "one by one": ({}, True),
    "budget of 16": ({"max_num_tokens": 16, "max_batch_size": 8}, False),
    "chunks of up to 40": ({"max_num_tokens": 40, "max_batch_size": 20}, False),
}
"""Name -> (configuration, whether each request waits for the one before it)."""

Outputs = list[tuple[list[int], NDArray[np.float32]]]


@pytest.fixture(scope="module")
def prompts(demo_model_path: Path) -> list[list[int]]:
    return chat_token_ids(open_checkpoint(demo_model_path))[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def engine_dir(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    built: dict[Variant, Path] = {}

    def build(variant: Variant) -> Path:
        if variant not in built:
            directory = tmp_path_factory.mktemp("engines") / "engine"
            built[variant] = build_smollm2(demo_model_path, variant, directory)
        return built[variant]

    return build


def outputs(engine_dir: Path, prompts: Sequence[list[int]], way: str, *, deterministic: bool) -> Outputs:
    """Tokens and logits `[NUM_TOKENS, vocab]` of each prompt, computed in one of the `WAYS`."""
    config, one_by_one = WAYS[way]
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    requests = [Request(prompt, NUM_TOKENS, output_config=output) for prompt in prompts]
    collected: Outputs = []
    with Executor(engine_dir, ExecutorConfig(deterministic=deterministic, **config)) as executor:
        for group in [[each] for each in requests] if one_by_one else [requests]:
            ids = executor.enqueue_requests(group)
            for (response,) in executor.await_responses(ids):
                logits = response.result.generation_logits
                assert logits is not None
                collected.append((response.result.output_token_ids[0], logits[0]))
    return collected


def test_float32_gives_the_same_greedy_tokens_in_every_way(
    engine_dir: Callable[[Variant], Path], prompts: list[list[int]]
) -> None:
    directory = engine_dir(Variant("openvino", "float32"))
    expected = [tokens for tokens, _ in outputs(directory, prompts, "all at once", deterministic=False)]
    for way in list(WAYS)[1:]:
        assert [tokens for tokens, _ in outputs(directory, prompts, way, deterministic=False)] == expected, way


@pytest.mark.parametrize(
    "variant",
    [
        Variant("openvino", "float32"),
        Variant("openvino", "bfloat16"),
        Variant("openvino", "bfloat16", "int8"),
    ],
    ids=str,
)
def test_deterministic_mode_gives_bit_equal_logits_in_every_way(
    engine_dir: Callable[[Variant], Path], prompts: list[list[int]], variant: Variant
) -> None:
    directory = engine_dir(variant)
    some = prompts[:6]
    expected = outputs(directory, some, "all at once", deterministic=True)
    for way in list(WAYS)[1:]:
        for (tokens, logits), (same_tokens, same_logits) in zip(
            outputs(directory, some, way, deterministic=True), expected, strict=True
        ):
            np.testing.assert_array_equal(logits, same_logits, err_msg=f"{variant}, {way}")
            assert tokens == same_tokens
