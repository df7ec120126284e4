"""The reference engine with our kernels in the place of its attention; run in a process that interprets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from executor import Executor, ExecutorConfig, KvCacheConfig
from executor.engines import reference
from executor.engines.reference_attention_triton import TritonAttention
from executor.engines.reference_operators import OPERATORS
from tests.executor.driving import request, run, tokens_of

PROMPTS = [[7], [5, 6, 7, 8, 9], list(range(40, 70)), list(range(90, 60, -1))]


def generate(engine_dir: Path, kv_cache_dtype: str | None, with_kernels: bool) -> list[list[int]]:
    """Greedy tokens of four requests that share their steps, through a whole Executor."""
    if with_kernels:
        _use_kernels()
    kv = KvCacheConfig(kv_cache_dtype=kv_cache_dtype)
    with Executor(engine_dir, ExecutorConfig(kv_cache_config=kv)) as executor:
        return [tokens_of(responses) for responses in run(executor, *(request(prompt, 8) for prompt in PROMPTS))]


def step_logits(model_path: Path, kv_cache_dtype: str, with_kernels: bool) -> NDArray[np.float32]:
    """Logits of a mixed step behind another one, sampled in any order."""
    from tests.engine_build.tiny_checkpoint import tiny_config
    from tests.executor.hand_fed import Piece, pack
    from tests.executor.tiny_engine import reference_engine

    if with_kernels:
        _use_kernels()
    engine = reference_engine(model_path, tiny_config(), kv_cache_dtype=kv_cache_dtype)
    first, second = list(range(20)), list(range(60, 90))
    engine.execute(pack([Piece(first, 0, 19, [3, 1, 4, 15, 9])], 4))
    pieces = [Piece(first, 19, 20, [3, 1, 4, 15, 9]), Piece(second, 0, 30, range(20, 28))]
    return engine.execute(pack(pieces, 4, [30, 0, 7])).copy()


def _use_kernels() -> None:
    attention = TritonAttention(num_multiprocessors=16)
    reference.OPERATORS = {**OPERATORS, ("inflight", "PagedAttention"): attention}  # type: ignore[attr-defined]
