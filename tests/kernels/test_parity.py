"""The kernels against the operator's definition, in Triton's interpreter: arithmetic, indices, every byte of the pool.

What the interpreter cannot show: it runs programs one by one, so no race; and it rounds products as numpy does, not as
tensor cores do. `tests/gpu` runs the same cases compiled.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_case import Case, run_apart, run_case

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of outputs near 1: float32 sums in another order, else one rounding of the output and one of the weights."""

MIXED = ((0, 1), (5, 1), (0, 13), (130, 2), (16, 20))
GENERATION = ((0, 1), (31, 1), (300, 1), (64, 1))

CASES = {
    "float32": Case(MIXED),
    "float16": Case(MIXED, dtype="float16", kv_cache_dtype="float16"),
    "bfloat16": Case(MIXED, dtype="bfloat16", kv_cache_dtype="bfloat16"),
    "a narrower pool": Case(MIXED, kv_cache_dtype="bfloat16"),
    "generation only": Case(GENERATION),
    "generation, split": Case(GENERATION, num_multiprocessors=64),
    "generation, split, bfloat16": Case(
        GENERATION, dtype="bfloat16", kv_cache_dtype="bfloat16", num_multiprocessors=64
    ),
    "drafts to verify, split": Case(((300, 5), (0, 3), (64, 1)), num_multiprocessors=64),
    "deterministic": Case(MIXED, deterministic=True),
    "head size 80": Case(MIXED, head_size=80),
    "head size 96": Case(GENERATION, head_size=96, num_multiprocessors=64),
    "head size 128": Case(MIXED, head_size=128),
    "head size 256": Case(GENERATION, head_size=256),
    "blocks of 32": Case(MIXED, tokens_per_block=32),
    "blocks of 64": Case(MIXED, tokens_per_block=64),
    "blocks of 5": Case(MIXED, tokens_per_block=5),
    "one key head": Case(MIXED, num_heads=6, num_kv_heads=1),
    "as many key heads as query heads": Case(MIXED, num_heads=3, num_kv_heads=3),
    "groups of 20": Case(GENERATION, num_heads=20, num_kv_heads=1),
    "sliding window": Case(MIXED, sliding_window=7),
    "sliding window, split": Case(GENERATION, sliding_window=150, num_multiprocessors=64),
    "soft cap": Case(MIXED, soft_cap=2.0),
    "int8": Case(MIXED, kv_cache_dtype="int8"),
    "int8, bfloat16": Case(MIXED, dtype="bfloat16", kv_cache_dtype="int8"),
    "int8, split": Case(GENERATION, dtype="float16", kv_cache_dtype="int8", num_multiprocessors=64),
    "fp8": Case(MIXED, kv_cache_dtype="float8_e4m3fn"),
    "fp8, bfloat16": Case(MIXED, dtype="bfloat16", kv_cache_dtype="float8_e4m3fn", head_size=80),
}


def check(case: Case, interpreter: ProcessPoolExecutor) -> None:
    outcome = interpreter.submit(run_case, case).result()
    assert outcome.same_pool_bytes
    torch.testing.assert_close(outcome.output, outcome.expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_compute_what_the_operator_says(case: Case, interpreter: ProcessPoolExecutor) -> None:
    check(case, interpreter)


@pytest.mark.parametrize(
    "case",
    [
        Case(((0, 60), (40, 3), (130, 2), (7, 25))),
        Case(((0, 40), (40, 3), (130, 2)), dtype="float16", kv_cache_dtype="float16", sliding_window=9),
        Case(((0, 40), (40, 3), (130, 2)), dtype="bfloat16", kv_cache_dtype="int8", num_heads=3, num_kv_heads=1),
        Case(((0, 40), (40, 3), (130, 2)), soft_cap=5.0, tokens_per_block=5),
    ],
    ids=["float32", "float16, window", "int8", "soft cap"],
)
def test_deterministic_rows_have_the_same_bits_alone_and_in_a_batch_however_they_are_cut(
    case: Case, interpreter: ProcessPoolExecutor
) -> None:
    case = replace(case, deterministic=True, num_multiprocessors=64)
    together, apart = interpreter.submit(run_apart, case, (1, 17, 18, 20)).result()
    assert torch.equal(together, apart)


@settings(max_examples=6, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 2)]),
    tokens_per_block=st.integers(1, 20),
    sliding_window=st.sampled_from([0, 0, 1, 5, 40]),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_ragged_step_over_any_block_table(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    tokens_per_block: int,
    sliding_window: int,
    deterministic: bool,
    seed: int,
    interpreter: ProcessPoolExecutor,
) -> None:
    case = Case(
        tuple(sequences),
        *heads,
        head_size=16,
        tokens_per_block=tokens_per_block,
        sliding_window=sliding_window,
        num_multiprocessors=16,
        deterministic=deterministic,
        seed=seed,
    )
    check(case, interpreter)
