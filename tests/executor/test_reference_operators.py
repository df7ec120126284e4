"""Every operator against the ONNX reference evaluator, and `PagedAttention` against the network's own definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from engine_build.network import paged_attention as defined_paged_attention
from executor.engines.reference_attention import paged_attention
from executor.engines.reference_operators import OPERATORS, ROWS_PER_TILE

_RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> NDArray[np.float32]:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


Case = tuple[str, Sequence[NDArray[Any]], dict[str, Any]]
CASES: list[Case] = [
    ("Add", [floats(3, 4), floats(4)], {}),
    ("Cast", [floats(3, 4) * 5], {"to": TensorProto.INT64}),
    ("Concat", [floats(2, 3), floats(2, 1)], {"axis": -1}),
    ("Cos", [floats(7)], {}),
    ("DequantizeLinear", [_RANDOM.integers(0, 256, (6, 4)).astype(np.uint8), np.float32(0.25)], {}),
    (
        "DequantizeLinear",
        [_RANDOM.integers(0, 256, (6, 4)).astype(np.uint8), floats(6), _RANDOM.integers(0, 256, 6).astype(np.uint8)],
        {"axis": 0},
    ),
    (
        "DequantizeLinear",
        [_RANDOM.integers(-128, 128, (6, 8)).astype(np.int8), floats(6, 2)],
        {"axis": 1, "block_size": 4},
    ),
    ("Gather", [floats(5, 3), integers(4, 0, 4)], {}),
    ("Gather", [floats(2, 5, 3), np.array([[1, 2], [3, 4]])], {"axis": 1}),
    ("MatMul", [floats(ROWS_PER_TILE * 2 + 3, 8), floats(8, 5)], {}),
    ("MatMul", [floats(0, 8), floats(8, 5)], {}),
    ("Mul", [floats(3, 1, 4), floats(5, 1)], {}),
    ("Neg", [floats(4)], {}),
    ("RMSNormalization", [floats(3, 8), floats(8)], {"epsilon": 1e-3}),
    ("RMSNormalization", [floats(3, 2, 8), floats(2, 8)], {"axis": 1}),
    ("Reshape", [floats(2, 6), integers(0, 3, -1)], {}),
    ("Reshape", [floats(0, 6), integers(0, 2, 3)], {"allowzero": 1}),
    ("Sigmoid", [floats(9) * 5], {}),
    ("Sin", [floats(7)], {}),
    ("Slice", [floats(5, 6), integers(1), integers(4)], {}),
    ("Slice", [floats(5, 6), integers(1, -2), integers(2**62, 2**62), integers(0, -1), integers(2, 1)], {}),
    ("Split", [floats(2, 7), integers(4, 1, 2)], {"axis": -1}),
    ("Transpose", [floats(2, 3, 4)], {}),
    ("Transpose", [floats(2, 3, 4)], {"perm": [1, 2, 0]}),
    ("Unsqueeze", [floats(2, 3), integers(-1, 0)], {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
def test_an_operator_does_what_the_onnx_reference_evaluator_does(case: Case) -> None:
    operator, inputs, attributes = case
    num_outputs = 3 if operator == "Split" else 1
    names = [f"input_{index}" for index in range(len(inputs))]
    outputs = [f"output_{index}" for index in range(num_outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, **attributes)],
        "one node",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))

    results = OPERATORS["", operator](*(torch.from_numpy(np.array(array)) for array in inputs), **attributes)
    for result, wanted in zip([results] if isinstance(results, torch.Tensor) else results, expected, strict=True):
        assert result.numpy().dtype == wanted.dtype
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_every_operator_has_a_case() -> None:
    assert {operator for operator, _, _ in CASES} == {name for domain, name in OPERATORS if domain == ""}


def test_rms_normalization_of_a_narrow_dtype_is_computed_in_float32() -> None:
    data = torch.full((1, 4096), 300.0, dtype=torch.float16)  # the sum of squares is far beyond float16
    ones = torch.ones(4096, dtype=torch.float16)
    result = OPERATORS["", "RMSNormalization"](data, ones)
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, ones[None])


@settings(deadline=None, max_examples=40)
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    tokens_per_block=st.integers(1, 8),
    sliding_window=st.sampled_from([0, 1, 5]),
    soft_cap=st.sampled_from([0.0, 0.5, 30.0]),
    cache_dtype=st.sampled_from([np.float32, np.float16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_paged_attention_equals_the_definition_of_the_network(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    tokens_per_block: int,
    sliding_window: int,
    soft_cap: float,
    cache_dtype: type[np.floating[Any]],
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    (num_heads, num_kv_heads), head_size = heads, 8
    num_rows = sum(new for _, new in lens)
    table_lens = [-(-(past + new) // tokens_per_block) for past, new in lens]
    num_blocks = sum(table_lens) + 2
    caches = generator.standard_normal((2, num_blocks, num_kv_heads, tokens_per_block, head_size)).astype(cache_dtype)
    inputs = [
        generator.standard_normal((num_rows, count * head_size)).astype(np.float32)
        for count in (num_heads, num_kv_heads, num_kv_heads)
    ]
    step = [
        np.array([past for past, _ in lens], np.int32),
        np.cumsum([0, *(new for _, new in lens)], dtype=np.int32),
        generator.permutation(num_blocks)[: sum(table_lens)].astype(np.int32),
        np.cumsum([0, *table_lens], dtype=np.int32),
    ]
    attributes: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "scale": 0.3,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
    }
    theirs, mine = caches.copy(), torch.from_numpy(caches.copy())
    expected = defined_paged_attention(*inputs, *theirs, *step, **attributes)
    result = paged_attention(
        *map(torch.from_numpy, inputs), *mine, *map(torch.from_numpy, step), torch.tensor(0), **attributes
    )
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(mine.numpy(), theirs)
