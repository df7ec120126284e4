"""The reference engine against transformers, and against itself under every way of feeding the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from executor.engines.interface import InvalidStepError
from executor.engines.reference import KV_CACHE_DTYPES, ReferenceEngine
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import (
    engine_spec,
    reference_engine,
    transformers_logits,
    transformers_model,
    write_tiny_network,
)
from tests.parity.greedy import greedy

CONFIGS = {
    "grouped-query heads, tied": tiny_config(),
    "one key head": tiny_config(num_key_value_heads=1),
    "as many key heads as query heads, untied": tiny_config(num_key_value_heads=4, tie_word_embeddings=False),
    "bias": tiny_config(attention_bias=True),
    "llama3 rope scaling": tiny_config(
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=32),
    ),
    "linear rope scaling": tiny_config(rope_scaling=RopeScaling("linear", 2.5)),
    "sliding window": tiny_config(sliding_window=7),
}
NUM_BLOCKS = 64


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, count).tolist()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers(config: ModelConfig, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(config, seed=3)
    engine = reference_engine(write_tiny_network(checkpoint, tmp_path), config)
    model = transformers_model(checkpoint)
    sequences = [random_tokens(count, count) for count in (1, 2, 19, 90)]
    tables = np.split(np.random.default_rng(0).permutation(NUM_BLOCKS), len(sequences))
    tables[-1] = np.concatenate([tables[-1], tables[0][1:]])  # the longest needs more than a quarter of the pool
    pieces = [Piece(ids, 0, len(ids), table.tolist()) for ids, table in zip(sequences, tables, strict=True)]
    logits = engine.execute(pack(pieces, 4))
    expected = np.concatenate([transformers_logits(model, ids) for ids in sequences])
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_network(TinyCheckpoint(), tmp_path_factory.mktemp("tiny"))


SEQUENCES = [random_tokens(count, seed=count) for count in (5, 33, 60)]


@pytest.fixture(scope="module")
def whole(model_path: Path) -> list[NDArray[np.float32]]:
    """Logits of each sequence alone, in one step, blocks in order."""
    engine = reference_engine(model_path, tiny_config())
    return [engine.execute(pack([Piece(ids, 0, len(ids), range(16))], 4)).copy() for ids in SEQUENCES]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), tokens_per_block=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_chunks_batches_blocks_and_replays_do_not_change_a_bit(
    data: st.DataObject, tokens_per_block: int, seed: int, model_path: Path, whole: list[NDArray[np.float32]]
) -> None:
    """Any split into steps, any company, any block table, any rows fed again: a row's logits stay what they are."""
    engine = reference_engine(model_path, tiny_config(), num_blocks=110, tokens_per_block=tokens_per_block)
    block_ids = iter(np.random.default_rng(seed).permutation(110).tolist())
    tables = [[next(block_ids) for _ in range(-(-len(ids) // tokens_per_block))] for ids in SEQUENCES]
    computed = [0] * len(SEQUENCES)
    while any(computed[index] < len(ids) for index, ids in enumerate(SEQUENCES)):
        pieces, owners = [], []
        for index in data.draw(st.permutations(range(len(SEQUENCES)))):
            rest = len(SEQUENCES[index]) - computed[index]
            num_rows = rest - data.draw(st.integers(0, rest), label=f"rows of sequence {index} that wait")
            if num_rows == 0:
                continue
            begin = computed[index] - data.draw(st.integers(0, min(computed[index], 3)), label="replayed")
            computed[index] += num_rows
            pieces.append(Piece(SEQUENCES[index], begin, computed[index], tables[index]))
            owners.append(index)
        if not pieces:
            continue
        logits = engine.execute(pack(pieces, tokens_per_block))
        begin_row = 0
        for piece, owner in zip(pieces, owners, strict=True):
            end_row = begin_row + piece.end - piece.begin
            np.testing.assert_array_equal(logits[begin_row:end_row], whole[owner][piece.begin : piece.end])
            begin_row = end_row


def test_the_extra_rows_of_deterministic_mode_do_not_change_a_token(model_path: Path) -> None:
    """Replayed rows of every decode step, and the padding row of a prompt of one token."""
    prompts = [[17], [5, 6], SEQUENCES[0], [18]]
    one, two = (
        greedy(reference_engine(model_path, tiny_config()), prompts, 20, min_rows_per_sequence=rows) for rows in (1, 2)
    )
    assert one == two


def test_only_sampled_rows_come_back_in_the_order_they_were_asked_for(
    model_path: Path, whole: list[NDArray[np.float32]]
) -> None:
    engine = reference_engine(model_path, tiny_config())
    piece = Piece(SEQUENCES[1], 0, 33, range(16))
    np.testing.assert_array_equal(engine.execute(pack([piece], 4, [32, 4, 4])), whole[1][[32, 4, 4]])
    assert engine.execute(pack([piece], 4, [])).shape == (0, 128)


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_a_block_read_from_one_engine_and_written_into_another_continues_the_sequence(
    kv_cache_dtype: str, model_path: Path
) -> None:
    config, ids = tiny_config(), SEQUENCES[1]
    first, second = (reference_engine(model_path, config, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    first.execute(pack([Piece(ids, 0, 20, [3, 1, 4, 15, 9])], 4))
    for source, target in zip([3, 1, 4, 15, 9], [2, 6, 5, 35, 8], strict=True):
        second.write_block(target, first.read_block(source))
    mine = first.execute(pack([Piece(ids, 20, 33, [3, 1, 4, 15, 9, 60, 61, 62, 63])], 4))
    theirs = second.execute(pack([Piece(ids, 20, 33, [2, 6, 5, 35, 8, 10, 11, 12, 13])], 4))
    np.testing.assert_array_equal(mine, theirs)


def test_copied_blocks_serve_a_second_sequence_while_the_first_goes_on(
    model_path: Path, whole: list[NDArray[np.float32]]
) -> None:
    engine = reference_engine(model_path, tiny_config())
    ids = SEQUENCES[1]
    engine.execute(pack([Piece(ids, 0, 10, [0, 1, 2])], 4))
    engine.copy_blocks(np.array([2]), np.array([7]))
    other = [*ids[:10], *reversed(ids[10:])]
    engine.execute(pack([Piece(other, 10, 33, [0, 1, 7, *range(20, 30)])], 4))
    logits = engine.execute(pack([Piece(ids, 10, 33, [0, 1, 2, *range(40, 50)])], 4))
    np.testing.assert_array_equal(logits, whole[1][10:])


def test_copies_read_every_source_before_they_write_a_target(model_path: Path) -> None:
    engine = reference_engine(model_path, tiny_config())
    size = engine.spec.kv_bytes_per_block
    for block_id in (0, 1):
        engine.write_block(block_id, np.full(size, block_id + 1, np.uint8))
    engine.copy_blocks(np.array([0, 1]), np.array([1, 0]))
    assert [set(engine.read_block(block_id).tolist()) for block_id in (0, 1)] == [{2}, {1}]


def test_a_refused_step_writes_nothing(model_path: Path) -> None:
    engine = reference_engine(model_path, tiny_config())
    before = [engine.read_block(block_id) for block_id in range(4)]
    good = pack([Piece(SEQUENCES[0], 0, 5, [0, 1])], 4)
    with pytest.raises(InvalidStepError, match=r"sampled_rows\[0\] is 5"):
        engine.execute(good._replace(sampled_rows=np.array([5])))
    after = [engine.read_block(block_id) for block_id in range(4)]
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("dtype", "quantized", "tolerance"),
    [("float32", True, 1e-5), ("bfloat16", False, 0.05), ("float16", False, 0.01)],
)
def test_quantized_and_narrow_networks_stay_near_the_same_weights_in_float32(
    dtype: str, quantized: bool, tolerance: float, tmp_path: Path
) -> None:
    checkpoint = TinyCheckpoint(tiny_config(dtype=dtype), seed=5, quantized=quantized)
    engine = reference_engine(write_tiny_network(checkpoint, tmp_path, dtype), checkpoint.config)
    logits = engine.execute(pack([Piece(SEQUENCES[2], 0, 60, range(16))], 4))
    expected = transformers_logits(transformers_model(checkpoint), SEQUENCES[2])
    assert np.abs(logits - expected).mean() < tolerance * np.abs(expected).mean()


@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("int8", 0.02), ("float8_e4m3fn", 0.1)])
def test_keys_and_values_in_8_bits_stay_near_those_in_float32(
    kv_cache_dtype: str, tolerance: float, model_path: Path, whole: list[NDArray[np.float32]]
) -> None:
    engine = reference_engine(model_path, tiny_config(), kv_cache_dtype=kv_cache_dtype)
    logits = engine.execute(pack([Piece(SEQUENCES[2], 0, 60, range(16))], 4))
    difference = np.abs(logits - whole[2]).mean()
    assert 0 < difference < tolerance * np.abs(whole[2]).mean()


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_block_ids_outside_the_pool_are_refused(block_id: int, model_path: Path) -> None:
    engine = reference_engine(model_path, tiny_config(), num_blocks=NUM_BLOCKS)
    with pytest.raises(InvalidStepError, match=str(block_id)):
        engine.read_block(block_id)
    with pytest.raises(InvalidStepError, match=str(block_id)):
        engine.write_block(block_id, np.zeros(engine.spec.kv_bytes_per_block, np.uint8))
    with pytest.raises(InvalidStepError, match=str(block_id)):
        engine.copy_blocks(np.array([0]), np.array([block_id]))


def test_block_data_of_another_size_is_refused(model_path: Path) -> None:
    engine = reference_engine(model_path, tiny_config())
    with pytest.raises(InvalidStepError, match=r"uint8\[2048\]"):
        engine.write_block(0, np.zeros(2047, np.uint8))


def test_wrong_construction_is_refused_with_what_would_be_right(model_path: Path) -> None:
    spec = engine_spec(tiny_config())
    with pytest.raises(ValueError, match="must be one of float32, float16, bfloat16, float8_e4m3fn, int8"):
        ReferenceEngine(model_path, spec, 4, kv_cache_dtype="int4")
    with pytest.raises(ValueError, match="device is 'abacus', which torch cannot use here"):
        ReferenceEngine(model_path, spec, 4, device="abacus")
    with pytest.raises(ValueError, match="num_blocks is 0"):
        ReferenceEngine(model_path, spec, 0)
    with pytest.raises(ValueError, match="in bfloat16 takes 1024"):
        ReferenceEngine(model_path, spec, 4, kv_cache_dtype="bfloat16")
    three_layers = engine_spec(tiny_config(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"missing \['key_cache_2', 'value_cache_2'\]"):
        ReferenceEngine(model_path, three_layers, 4)
