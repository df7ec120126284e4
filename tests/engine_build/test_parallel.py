"""A model divided over devices is the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.parallel import ParallelError, Rank, RankCheckpoint, check_parallel
from tests.engine_build.simulated_ranks import Feeds, SimulatedRanks
from tests.engine_build.test_network import NUM_BLOCKS, TOKENS_PER_BLOCK, evaluated
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("config", "tp_size", "pp_size"),
    [
        (_CONFIG, 2, 1),
        (_CONFIG, 4, 1),
        (_CONFIG, 1, 3),
        (_CONFIG, 2, 2),
        (tiny_config(num_attention_heads=8, num_key_value_heads=2), 4, 1),
        (tiny_config(tie_word_embeddings=False, attention_bias=True), 2, 2),
    ],
    ids=["2 devices", "4 devices", "3 stages", "2 stages of 2", "a key head on 2 devices", "untied, bias, 2 x 2"],
)
def test_all_devices_together_give_the_logits_of_one(
    config: ModelConfig, tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    checkpoint = TinyCheckpoint(config, seed=4)
    ranks = SimulatedRanks(checkpoint, tmp_path / "ranks", tp_size, pp_size, (NUM_BLOCKS, TOKENS_PER_BLOCK))
    alone = evaluated(checkpoint, tmp_path)
    tokens = np.random.default_rng(7).integers(0, config.vocab_size, 12)
    for begin, end in ((0, 9), (9, 12)):
        inputs: Feeds = {
            "input_ids": tokens[begin:end],
            "position_ids": np.arange(begin, end),
            "past_lens": np.array([begin], np.int32),
            "subsequence_begins": np.array([0, end - begin], np.int32),
            "block_indices": np.array([5, 2], np.int32),
            "block_indices_begins": np.array([0, 2], np.int32),
            "max_context_len": np.array(end, np.int32),
            "sampled_rows": np.arange(end - begin),
        }
        expected = alone.logits(tokens[begin:end], [5, 2], past=begin)
        for logits in ranks.logits(inputs):
            np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_ranks_are_numbered_stage_by_stage() -> None:
    assert [Rank.of(rank, 2, 3) for rank in range(6)] == [
        Rank(2, 3, tp_rank, pp_rank) for pp_rank in range(3) for tp_rank in range(2)
    ]
    assert Rank.of(3, 2, 3).tp_group == (2, 3)
    assert [list(Rank(pp_size=3, pp_rank=stage).layers(8)) for stage in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_devices_hold_every_row_and_column_between_them() -> None:
    whole = TinyCheckpoint(_CONFIG, quantized=True)
    shares = [RankCheckpoint(whole, Rank(tp_size=2, tp_rank=rank)) for rank in range(2)]
    for name, axis in (("self_attn.k_proj", 0), ("mlp.up_proj", 0), ("self_attn.o_proj", 1)):
        name = f"model.layers.1.{name}.weight"
        parts = [share.tensor(name).to_float32() for share in shares]
        np.testing.assert_array_equal(np.concatenate(parts, axis=axis), whole.tensor(name).to_float32())


@pytest.mark.parametrize(
    ("config", "sizes", "said"),
    [
        (_CONFIG, (3, 1), "tp_size 3 does not divide num_attention_heads 8"),
        (tiny_config(intermediate_size=99), (2, 1), "tp_size 2 does not divide intermediate_size 99"),
        (tiny_config(vocab_size=127), (2, 1), "tp_size 2 does not divide vocab_size 127"),
        (tiny_config(num_attention_heads=12, num_key_value_heads=3), (2, 1), "neither divides num_key_value_heads 3"),
        (_CONFIG, (1, 4), "pp_size 4 is more than the model's 3 layers"),
    ],
)
def test_sizes_that_cannot_be_shared_are_named(config: ModelConfig, sizes: tuple[int, int], said: str) -> None:
    with pytest.raises(ParallelError, match=said):
        check_parallel(config, *sizes)
