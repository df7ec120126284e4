"""The reference engine with our kernels, interpreted, against itself with the operator's definition."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor.engines.reference_kv_cache import KV_CACHE_DTYPES
from tests.engine_build.tiny_checkpoint import TinyCheckpoint
from tests.executor.tiny_engine import write_tiny_network
from tests.kernels.interpreted_engine import generate, step_logits


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_logits_of_a_mixed_step_are_those_of_the_definition(
    kv_cache_dtype: str, tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    model_path = write_tiny_network(TinyCheckpoint(), tmp_path)
    expected = step_logits(model_path, kv_cache_dtype, False)
    logits = interpreter.submit(step_logits, model_path, kv_cache_dtype, True).result()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_requests_that_share_steps_get_the_same_tokens_through_a_whole_executor(
    tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    checkpoint, target = TinyCheckpoint(), select_target("reference")
    config = resolve_build_config(
        checkpoint.config, target, max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_block=4
    )
    build_engine(checkpoint, config, target, tmp_path / "engine", lambda *_: None)
    tokens = interpreter.submit(generate, tmp_path / "engine", None, True).result()
    assert tokens == generate(tmp_path / "engine", None, False)
    assert [len(each) for each in tokens] == [8] * 4
