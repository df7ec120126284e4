"""A real model, real chat prompts: the engines say what transformers says.

Equal tokens is what is asked for. Where two logits of the oracle tie, a sum in another order may turn the choice, and
from there on the texts are different ones: so the first difference must fall on a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_build.checkpoint import open_checkpoint
from tests.parity.chat_prompts import chat_token_ids
from tests.parity.oracle import Difference, Oracle
from tests.parity.smollm2 import NUM_TOKENS, Variant, build_smollm2, generate

pytestmark = pytest.mark.model

FLOAT32_TIE = 0.001
BFLOAT16_TIE = 0.15


@pytest.fixture(scope="module")
def oracle(demo_model_path: Path) -> Oracle:
    return Oracle(demo_model_path)


@pytest.fixture(scope="module")
def prompts(demo_model_path: Path) -> list[list[int]]:
    return chat_token_ids(open_checkpoint(demo_model_path))


@pytest.mark.parametrize(
    ("variant", "tie"),
    [(Variant("openvino", "float32"), FLOAT32_TIE), (Variant("openvino", "bfloat16"), BFLOAT16_TIE)],
    ids=str,
)
def test_greedy_tokens_equal_transformers_up_to_a_tie(
    variant: Variant,
    tie: float,
    oracle: Oracle,
    prompts: list[list[int]],
    demo_model_path: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    generated = generate(demo_model_path, build_smollm2(demo_model_path, variant, tmp_path / "engine"))
    assert len(prompts) >= 20
    assert {len(tokens) for tokens in generated} == {NUM_TOKENS}
    differences: dict[int, Difference] = {}
    for index, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        difference = oracle.first_difference(prompt, tokens)
        if difference is not None:
            differences[index] = difference
            record_property(f"prompt {index}", difference)
            print(f"prompt {index}: {difference}")
    assert {index: found for index, found in differences.items() if found.margin >= tie} == {}


def test_one_teacher_forced_pass_finds_what_an_argmax_loop_finds(oracle: Oracle, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    tokens = oracle.greedy(prompt, 24)
    assert oracle.first_difference(prompt, tokens) is None
    changed = [*tokens[:10], tokens[10] + 1, *tokens[11:]]
    difference = oracle.first_difference(prompt, changed)
    assert difference is not None
    assert (difference.index, difference.oracle_token_id) == (10, tokens[10])
