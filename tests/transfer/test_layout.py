"""Blocks of one layout as blocks of another, whatever the split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.transfer.layout import (
    ELEMENT_TYPES,
    IncompatibleLayoutError,
    KvLayout,
    check_compatible,
    dequantize_rows,
    gather,
    quantize_rows,
    relayout,
    shards,
    to_blocks,
    to_rows,
)

WHOLE = KvLayout("float32", 16, 4, 4, 4, (0, 4), (0, 4))

sizes = st.sampled_from([16, 32, 64])
splits = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))


def random_rows(layout: KvLayout, num_tokens: int, seed: int) -> np.ndarray:
    """Rows `[layers, 2, heads, tokens, row]` of the whole model."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_size))
    return np.ascontiguousarray(values.astype(ELEMENT_TYPES[layout.dtype])).view(np.uint8)


def blocks_of(rows: np.ndarray, layout: KvLayout) -> np.ndarray:
    """What a rank of this layout holds of the whole model's rows."""
    return to_blocks(rows[slice(*layout.layers), :, slice(*layout.heads)], layout)


@given(sizes, sizes, splits, splits, st.integers(1, 200), st.integers(0, 9))
def test_any_split_becomes_any_other_split_to_the_bit(
    size: int, other: int, split: tuple[int, int], other_split: tuple[int, int], num_tokens: int, seed: int
) -> None:
    senders = shards(replace(WHOLE, tokens_per_block=size), *split)
    receivers = shards(replace(WHOLE, tokens_per_block=other), *other_split)
    rows = random_rows(WHOLE, num_tokens, seed)
    sources = [(layout, blocks_of(rows, layout)) for layout in senders]
    for receiver in receivers:
        needed = [
            (layout, blocks)
            for layout, blocks in sources
            if max(layout.layers[0], receiver.layers[0]) < min(layout.layers[1], receiver.layers[1])
            and max(layout.heads[0], receiver.heads[0]) < min(layout.heads[1], receiver.heads[1])
        ]
        assert np.array_equal(relayout(needed, receiver, num_tokens), blocks_of(rows, receiver))


@given(sizes, splits, st.integers(1, 200))
def test_there_and_back_is_where_it_began(size: int, split: tuple[int, int], num_tokens: int) -> None:
    rows = random_rows(WHOLE, num_tokens, 0)
    ranks = shards(replace(WHOLE, tokens_per_block=size), *split)
    there = [(rank, blocks_of(rows, rank)) for rank in ranks]
    assert np.array_equal(relayout(there, WHOLE, num_tokens), blocks_of(rows, WHOLE))


@given(st.integers(1, 5), sizes)
def test_blocks_are_rows_and_rows_are_blocks(num_blocks: int, size: int) -> None:
    layout = replace(WHOLE, tokens_per_block=size)
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, layout.bytes_per_block), np.uint8)
    assert np.array_equal(to_blocks(to_rows(blocks, layout), layout), blocks)


@given(st.floats(1e-3, 1e3), st.integers(0, 99))
def test_eight_bits_are_within_half_a_step(scale: float, seed: int) -> None:
    values = (np.random.default_rng(seed).normal(size=(3, 5, 64)) * scale).astype(np.float32)
    step = (values.max(-1, keepdims=True) - values.min(-1, keepdims=True)) / 255
    assert (np.abs(dequantize_rows(quantize_rows(values)) - values) <= 0.51 * step).all()


def test_a_row_of_equal_numbers_keeps_them() -> None:
    values = np.full((1, 64), 3.25, np.float32)
    assert np.allclose(dequantize_rows(quantize_rows(values)), values, atol=1e-3)


def test_bfloat16_becomes_eight_bits() -> None:
    sender, receiver = replace(WHOLE, dtype="bfloat16"), replace(WHOLE, dtype="uint8", tokens_per_block=32)
    rows = random_rows(sender, 40, 1)
    received = to_rows(relayout([(sender, blocks_of(rows, sender))], receiver, 40), receiver)[:, :, :, :40]
    wanted = rows.view(ELEMENT_TYPES["bfloat16"]).astype(np.float32)
    step = (wanted.max(-1, keepdims=True) - wanted.min(-1, keepdims=True)) / 255
    assert (np.abs(dequantize_rows(received) - wanted) <= 0.51 * step).all()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(WHOLE, head_size=8), "head_size is 4 at the sender and 8 at the receiver"),
        (replace(WHOLE, num_layers=8, layers=(0, 8)), "num_layers is 4 at the sender and 8 at the receiver"),
        (replace(WHOLE, num_kv_heads=2, heads=(0, 2)), "num_kv_heads is 4 at the sender and 2 at the receiver"),
        (replace(WHOLE, dtype="int3"), "dtype is 'int3'"),
        (replace(WHOLE, tokens_per_block=0), "tokens_per_block is 0"),
    ],
)
def test_pairs_that_cannot_be_are_refused_by_what_differs(other: KvLayout, why: str) -> None:
    with pytest.raises(IncompatibleLayoutError, match=why):
        check_compatible(WHOLE, other)


def test_eight_bits_do_not_become_more() -> None:
    with pytest.raises(IncompatibleLayoutError, match="what rounding took is lost"):
        check_compatible(replace(WHOLE, dtype="uint8"), WHOLE)


def test_a_missing_rank_is_named() -> None:
    first = shards(WHOLE, 2, 1)[0]
    blocks = np.zeros((1, first.bytes_per_block), np.uint8)
    with pytest.raises(IncompatibleLayoutError, match="no sender holds layer 0, head 2"):
        gather([(first, blocks)], WHOLE, 4)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(IncompatibleLayoutError, match="4 heads and 4 layers cannot be split over 3"):
        shards(WHOLE, 3, 1)
