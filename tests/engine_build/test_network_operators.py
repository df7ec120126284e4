"""The parts of the network that have a definition of their own: paged attention, 8-bit groups, rotary frequencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from engine_build.network import paged_attention
from engine_build.network.rope import inverse_frequencies
from engine_build.network.weights import quantize
from tests.engine_build.tiny_checkpoint import tiny_config

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 8
SCALE = 0.5


def attend(
    lengths: list[tuple[int, int]],
    projected: list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]],
    tables: list[list[int]],
    caches: tuple[NDArray[np.float32], NDArray[np.float32]],
    sliding_window: int = 0,
) -> list[NDArray[np.float32]]:
    """Feed rows `begin` to `end` of every sequence; returns the output by sequence."""
    begins = np.cumsum([0, *(end - begin for begin, end in lengths)], dtype=np.int32)
    query, key, value = (
        np.concatenate([parts[index][begin:end] for parts, (begin, end) in zip(projected, lengths, strict=True)])
        for index in range(3)
    )
    output = paged_attention(
        query,
        key,
        value,
        *caches,
        np.array([begin for begin, _ in lengths], np.int32),
        begins,
        np.array([block for table in tables for block in table], np.int32),
        np.cumsum([0, *map(len, tables)], dtype=np.int32),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        scale=SCALE,
        sliding_window=sliding_window,
    )
    return np.split(output, begins[1:-1])


def dense_attention(
    query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32], sliding_window: int
) -> NDArray[np.float32]:
    """One whole sequence, row by row and head by head, without blocks."""
    output = np.empty_like(query).reshape(-1, NUM_HEADS, HEAD_SIZE)
    queries = query.reshape(output.shape)
    keys, values = (x.reshape(-1, NUM_KV_HEADS, HEAD_SIZE) for x in (key, value))
    for row in range(len(output)):
        first = max(0, row + 1 - sliding_window) if sliding_window else 0
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = SCALE * keys[first : row + 1, kv_head] @ queries[row, head]
            weights = np.exp(scores - scores.max())
            output[row, head] = weights @ values[first : row + 1, kv_head] / weights.sum()
    return output.reshape(query.shape)


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4),
    cuts=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    tokens_per_block=st.sampled_from([1, 3, 8]),
    sliding_window=st.sampled_from([0, 1, 4, 64]),
    seed=st.integers(0, 1000),
)
def test_paged_attention_is_attention_however_sequences_are_cut_and_blocks_are_shuffled(
    lengths: list[int], cuts: list[float], tokens_per_block: int, sliding_window: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    width = [heads * HEAD_SIZE for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    projected = [
        tuple(generator.standard_normal((length, size)).astype(np.float32) for size in width) for length in lengths
    ]
    blocks_needed = [-(-length // tokens_per_block) for length in lengths]
    shuffled = generator.permutation(sum(blocks_needed) + 2)
    tables = [part.tolist() for part in np.split(shuffled[:-2], np.cumsum(blocks_needed)[:-1])]
    shape = (len(shuffled), NUM_KV_HEADS, tokens_per_block, HEAD_SIZE)
    caches = (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32))

    middles = [1 + int(cut * (length - 2)) for cut, length in zip(cuts, lengths, strict=False)]
    first = attend([(0, middle) for middle in middles], projected, tables, caches, sliding_window)
    second = attend(list(zip(middles, lengths, strict=True)), projected, tables, caches, sliding_window)
    for parts, before, after in zip(projected, first, second, strict=True):
        expected = dense_attention(*parts, sliding_window)
        np.testing.assert_allclose(np.concatenate([before, after]), expected, atol=2e-6)
    untouched = shuffled[-2:]
    assert all(np.isnan(cache[untouched]).all() for cache in caches)


def test_a_narrow_cache_rounds_keys_and_values_and_nothing_else() -> None:
    generator = np.random.default_rng(0)
    exact = tuple(generator.standard_normal((6, size)).astype(np.float32) for size in (32, 16, 16))
    rounded = (exact[0], *(x.astype(np.float16).astype(np.float32) for x in exact[1:]))
    narrow, wide = (
        tuple(np.zeros((2, NUM_KV_HEADS, 4, HEAD_SIZE), dtype) for _ in range(2)) for dtype in (np.float16, np.float32)
    )
    (from_narrow,) = attend([(0, 6)], [exact], [[1, 0]], narrow)
    (from_wide,) = attend([(0, 6)], [rounded], [[1, 0]], wide)
    np.testing.assert_array_equal(from_narrow, from_wide)


@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-12, 12),
)
def test_quantized_weights_are_within_half_a_step(seed: int, exponent: int) -> None:
    weights = (np.random.default_rng(seed).standard_normal((5, 96)) * 2.0**exponent).astype(np.float32)
    quantized = quantize(weights)
    assert quantized.values.shape == (5, 96)
    assert quantized.scales.shape == (5, 3)
    steps = np.repeat(quantized.scales.astype(np.float32), 32, axis=1)
    # Half a step, and what the largest weights of a group lose where the float16 scale was rounded down.
    lost = 127 * np.maximum(2.0**-11 * steps, 2.0**-25)
    assert (np.abs(quantized.to_float32() - weights) <= 0.5 * steps + lost).all()


def test_a_group_of_zeros_or_of_weights_too_small_for_a_scale_is_zero() -> None:
    weights = np.zeros((1, 64), np.float32)
    weights[0, 40] = 1e-9
    assert not quantize(weights).to_float32().any()


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(rope_theta=500_000.0, head_size=64),
        tiny_config(rope_scaling=RopeScaling("linear", 4.0)),
        tiny_config(head_size=128, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        tiny_config(head_size=64, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
    ],
    ids=["plain", "large theta", "linear", "Llama 3.1", "Llama 3.2"],
)
def test_rotary_frequencies_are_those_of_transformers(config: ModelConfig) -> None:
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        parameters |= {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    hugging_face = LlamaConfig(
        head_dim=config.head_size, rope_parameters=parameters, max_position_embeddings=config.max_position_embeddings
    )
    expected = LlamaRotaryEmbedding(hugging_face).inv_freq.numpy()
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-6)
