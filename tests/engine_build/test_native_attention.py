"""The lowering of `PagedAttention` to standard operators computes what the operator's definition says."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import openvino
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from engine_build.builder import resolve_build_config
from engine_build.network import DOMAIN, MODEL_FILE, NetworkOptions, paged_attention, write_network
from engine_build.network.paged_attention import OPERATOR
from engine_build.targets.interface import TensorRtOptions
from engine_build.targets.openvino import read_network
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.native_attention import lower_paged_attention
from engine_build.targets.tensorrt.plugin_attention import layer_kernels
from tests.engine_build.lowered_network import Feeds, LoweredNetwork, with_soft_cap
from tests.engine_build.test_network import NUM_BLOCKS, TOKENS_PER_BLOCK, evaluated
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_STEP = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


class _Case(NamedTuple):
    """One layer and one step."""

    heads: int
    kv_heads: int
    head_size: int
    tokens_per_block: int
    sliding_window: int
    soft_cap: float
    past_and_rows: list[tuple[int, int]]
    """Of each sequence: positions in the pool, rows in this step."""
    seed: int


_cases = st.builds(
    lambda group, kv_heads, head_size, tokens_per_block, window, soft_cap, sequences, seed: _Case(
        group * kv_heads, kv_heads, head_size, tokens_per_block, window, soft_cap, sequences, seed
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0.0, 0.5, 30.0]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 1000),
)


def _model(case: _Case) -> onnx.ModelProto:
    width, kv_width = case.heads * case.head_size, case.kv_heads * case.head_size
    pool = ["num_blocks", case.kv_heads, "tokens_per_block", case.head_size]
    shapes = {"query": ["T", width], "key": ["T", kv_width], "value": ["T", kv_width], "key_cache": pool}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (shapes | {"value_cache": pool}).items()
    ]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [f"size of {name}"]) for name in _STEP]
    inputs.append(helper.make_tensor_value_info("max_context_len", TensorProto.INT32, []))
    node = helper.make_node(
        OPERATOR,
        [value.name for value in inputs],
        ["output"],
        domain=DOMAIN,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_size=case.head_size,
        scale=0.3,
        sliding_window=case.sliding_window,
        **({"soft_cap": case.soft_cap} if case.soft_cap else {}),
    )
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["T", width])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "layer", inputs, [output]), opset_imports=opsets)


def _feeds(case: _Case) -> Feeds:
    generator = np.random.default_rng(case.seed)
    past, rows = (np.array(column) for column in zip(*case.past_and_rows, strict=True))
    blocks = -(-(past + rows) // case.tokens_per_block)
    num_blocks = int(blocks.sum()) + 3
    pool = (num_blocks, case.kv_heads, case.tokens_per_block, case.head_size)
    shapes = {
        "query": (rows.sum(), case.heads * case.head_size),
        "key": (rows.sum(), case.kv_heads * case.head_size),
        "value": (rows.sum(), case.kv_heads * case.head_size),
        "key_cache": pool,
        "value_cache": pool,
    }
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | {
        "past_lens": past.astype(np.int32),
        "subsequence_begins": np.concatenate([[0], rows.cumsum()]).astype(np.int32),
        "block_indices": generator.permutation(num_blocks)[: blocks.sum()].astype(np.int32),
        "block_indices_begins": np.concatenate([[0], blocks.cumsum()]).astype(np.int32),
    }


@given(case=_cases)
@settings(max_examples=40)
def test_the_lowering_is_the_operator_whatever_the_step(case: _Case) -> None:
    feeds = _feeds(case)
    lowered = ReferenceEvaluator(lower_paged_attention(_model(case), case.tokens_per_block))
    output, key_cache, value_cache = lowered.run(None, feeds)
    expected = paged_attention(
        **feeds,  # writes its caches in place
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_size=case.head_size,
        scale=0.3,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(key_cache, feeds["key_cache"])
    np.testing.assert_array_equal(value_cache, feeds["value_cache"])


def test_a_lowered_network_gives_the_same_logits_step_after_step(tmp_path: Path) -> None:
    """Two sequences, a prompt in two chunks beside one that generates; shuffled tables."""
    config = tiny_config(sliding_window=5)
    network = evaluated(TinyCheckpoint(config, seed=2), tmp_path)
    lowered = LoweredNetwork(tmp_path, TOKENS_PER_BLOCK)
    pool = np.zeros((NUM_BLOCKS, config.num_key_value_heads, TOKENS_PER_BLOCK, config.head_size), np.float32)
    caches: Feeds = {f"{kind}_cache_{layer}": pool for layer in range(2) for kind in ("key", "value")}
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 16))
    tables = [[7, 3], [1, 10]]
    for first, second in (((0, 9), (0, 4)), ((9, 15), (4, 5)), ((15, 16), (5, 6))):
        spans = (first, second)
        rows = [end - begin for begin, end in spans]
        inputs: Feeds = {
            "input_ids": np.concatenate([tokens[index, begin:end] for index, (begin, end) in enumerate(spans)]),
            "position_ids": np.concatenate([np.arange(begin, end) for begin, end in spans]),
            "past_lens": np.array([begin for begin, _ in spans], np.int32),
            "subsequence_begins": np.array([0, rows[0], sum(rows)], np.int32),
            "block_indices": np.array(tables[0] + tables[1], np.int32),
            "block_indices_begins": np.array([0, 2, 4], np.int32),
            "sampled_rows": np.array([rows[0] - 1, sum(rows) - 1]),
        }
        logits = lowered.run(inputs, caches)
        for index, (begin, end) in enumerate(spans):
            alone = network.logits(tokens[index, begin:end], tables[index], past=begin, sampled=[end - begin - 1])
            np.testing.assert_allclose(logits[index], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_of_our_own_domain_is_left(dtype: str, tmp_path: Path) -> None:
    write_network(TinyCheckpoint(), NetworkOptions(dtype=dtype, activation_dtype=dtype), tmp_path)
    model = LoweredNetwork(tmp_path, 16).model
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.domain for opset in model.opset_import] == [""]
    assert "max_context_len" not in {value.name for value in model.graph.input}


def test_openvino_refuses_a_bound_of_scores_by_name(tmp_path: Path) -> None:
    write_network(TinyCheckpoint(), NetworkOptions(), tmp_path)
    path = tmp_path / MODEL_FILE
    onnx.save(with_soft_cap(onnx.load(path, load_external_data=False), 30.0), path)
    with pytest.raises(RuntimeError, match="soft_cap is not supported: OpenVINO's paged attention does not bound"):
        read_network(openvino.Core(), path)


def test_kernels_of_plugins_are_compiled_for_the_bound_of_scores() -> None:
    model = with_soft_cap(_model(_Case(2, 1, 16, 16, 0, 0.0, [(0, 1)], 0)), 30.0)
    target = select_target("tensorrt")
    build_config = resolve_build_config(
        tiny_config(head_size=16), target, tensorrt=TensorRtOptions(compute_capabilities=("9.0",)), dtype="float16"
    )
    assert layer_kernels(model.graph.node[0], build_config).shape.soft_cap == 30.0
