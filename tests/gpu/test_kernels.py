"""The kernels, compiled, against the operator's definition on the same GPU."""

from __future__ import annotations

import pytest
import torch

from executor.engines.reference_attention_triton import TritonAttention
from tests.kernels.attention_case import Case, call, random_arguments, run_case
from tests.kernels.test_parity import CASES

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
LONG = ((4000, 1), (1, 1), (2047, 1), (900, 1), (17, 1), (3000, 1))
LARGE = {
    "long contexts, bfloat16": Case(LONG, 32, 8, 128, 16, "bfloat16", "bfloat16", num_multiprocessors=132),
    "long contexts, int8": Case(LONG, 32, 8, 128, 32, "bfloat16", "int8", num_multiprocessors=132),
    "long contexts, fp8": Case(LONG, 32, 8, 128, 64, "float16", "float8_e4m3fn", num_multiprocessors=132),
    "prompts and generation, head size 256": Case(
        ((0, 700), (512, 300), (1500, 1), (3, 5)), 16, 8, 256, 32, "bfloat16", "bfloat16", num_multiprocessors=132
    ),
    "prompts in a window with a cap": Case(
        ((0, 700), (512, 300), (1500, 1)), 32, 8, 128, 16, "float16", "float16", sliding_window=256, soft_cap=30.0
    ),
}


@pytest.mark.parametrize("case", [*CASES.values(), *LARGE.values()], ids=[*CASES, *LARGE])
def test_compiled_kernels_compute_what_the_operator_says(case: Case) -> None:
    if case.kv_cache_dtype == "float8_e4m3fn" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    outcome = run_case(case, "cuda")
    assert outcome.same_pool_bytes
    torch.testing.assert_close(outcome.output, outcome.expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_rows_have_the_same_bits_however_their_sequence_is_cut(dtype: str) -> None:
    """One sequence of 300 rows at once, and the same rows in pieces beside others."""
    whole = Case(((0, 300),), 8, 2, 64, 16, dtype, dtype, deterministic=True)
    attention = TritonAttention(num_multiprocessors=132, deterministic=True)
    arguments = random_arguments(whole, "cuda")
    pools = [arguments.pop("key_cache"), arguments.pop("value_cache")]
    expected = call(attention, whole, arguments, [pool.clone() for pool in pools])
    mine = [pool.clone() for pool in pools]
    for begin, end in ((0, 1), (1, 130), (130, 131), (131, 133), (133, 300)):
        step = {name: arguments[name][begin:end] for name in ("query", "key", "value")}
        places = {
            "past_lens": torch.tensor([begin], dtype=torch.int32, device="cuda"),
            "subsequence_begins": torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            "max_context_len": torch.tensor(end),
        }
        output = call(attention, whole, arguments | step | places, mine)
        assert torch.equal(output, expected[begin:end])


def test_a_generation_step_can_be_captured_in_a_graph() -> None:
    case = Case(LONG, 32, 8, 128, 16, "bfloat16", "bfloat16", num_multiprocessors=132)
    attention = TritonAttention(num_multiprocessors=132)
    arguments = random_arguments(case, "cuda")
    pools = [arguments.pop("key_cache"), arguments.pop("value_cache")]
    expected = call(attention, case, arguments, pools).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(attention, case, arguments, pools)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
