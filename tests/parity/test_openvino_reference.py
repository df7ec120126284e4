"""The OpenVINO engine against the reference engine, on the same graph and the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from executor.engines.interface import StepInputs
from executor.engines.openvino import OpenVinoEngine
from executor.engines.reference import ReferenceEngine
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import engine_spec, reference_engine, write_tiny_network
from tests.parity.greedy import greedy

TOKENS_PER_BLOCK = 32
NUM_BLOCKS = 48

CONFIGS = {
    "grouped-query heads, tied": tiny_config(),
    "one key head, untied": tiny_config(num_key_value_heads=1, tie_word_embeddings=False),
    "bias": tiny_config(attention_bias=True),
    "llama3 rope scaling": tiny_config(
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=32)
    ),
    "sliding window": tiny_config(sliding_window=40),
}


SEQUENCES = [np.random.default_rng(count).integers(0, 128, count).tolist() for count in (1, 2, 31, 32, 33, 90, 100)]


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "8-bit groups"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_greedy_tokens_agree_in_float32(config: ModelConfig, quantized: bool, tmp_path: Path) -> None:
    """With 8-bit weights, too: a float32 plan rounds no activations."""
    openvino, reference = engines(TinyCheckpoint(config, seed=11, quantized=quantized), tmp_path)
    for step in two_steps():
        expected = reference.execute(step)
        np.testing.assert_allclose(openvino.execute(step), expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
    assert greedy(openvino, SEQUENCES, 40) == greedy(reference, SEQUENCES, 40)


def engines(checkpoint: TinyCheckpoint, directory: Path) -> tuple[OpenVinoEngine, ReferenceEngine]:
    """Both over the same network."""
    model_path = write_tiny_network(checkpoint, directory)
    config = checkpoint.config
    openvino = OpenVinoEngine(
        model_path,
        engine_spec(config, tokens_per_block=TOKENS_PER_BLOCK),
        NUM_BLOCKS,
        kv_cache_dtype="float32",
        precision="float32",
        num_threads=1,
    )
    return openvino, reference_engine(model_path, config, num_blocks=NUM_BLOCKS, tokens_per_block=TOKENS_PER_BLOCK)


def two_steps() -> Iterator[StepInputs]:
    """First parts of all sequences, then their rests with some rows fed again; blocks in no order."""
    tables = np.random.default_rng(7).permutation(NUM_BLOCKS)[: 4 * len(SEQUENCES)].reshape(-1, 4).tolist()
    for begins, ends in (
        ([0, 0, 0, 0, 0, 0, 0], [1, 1, 20, 31, 32, 64, 7]),
        ([0, 1, 19, 31, 30, 64, 7], [len(sequence) for sequence in SEQUENCES]),
    ):
        yield pack(list(map(Piece, SEQUENCES, begins, ends, tables)), TOKENS_PER_BLOCK)
