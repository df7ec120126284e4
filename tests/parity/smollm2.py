"""SmolLM2-135M-Instruct as an engine directory, and what an engine generates for the chat prompts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint import open_checkpoint
from engine_build.targets.select import select_target
from executor.engines.open import open_engine
from tests.parity.chat_prompts import chat_token_ids
from tests.parity.greedy import greedy

NUM_TOKENS = 64
"""Tokens compared for each prompt."""
MAX_SEQ_LEN = 256


class Variant(NamedTuple):
    """One way to build and run the model."""

    target: str
    dtype: str
    weight_dtype: str = "as_stored"

    def __str__(self) -> str:
        return f"{self.target} {self.dtype}" + (" int8 weights" if self.weight_dtype == "int8" else "")


def build_smollm2(gguf_path: Path, variant: Variant, engine_dir: Path) -> Path:
    """Write the engine directory and return its path."""
    checkpoint = open_checkpoint(gguf_path)
    target = select_target(variant.target)
    build_config = resolve_build_config(
        checkpoint.config,
        target,
        max_batch_size=32,
        max_num_tokens=256,
        max_seq_len=MAX_SEQ_LEN,
        dtype=variant.dtype,
        weight_dtype=variant.weight_dtype,
    )
    build_engine(checkpoint, build_config, target, engine_dir, lambda _stage, _done, _total: None)
    return engine_dir


def generate(gguf_path: Path, engine_dir: Path) -> list[list[int]]:
    """`NUM_TOKENS` greedy tokens for each chat prompt, all prompts in flight at once."""
    prompts = chat_token_ids(open_checkpoint(gguf_path))
    engine = open_engine(engine_dir, num_blocks=len(prompts) * MAX_SEQ_LEN // 32)
    try:
        return greedy(engine, prompts, NUM_TOKENS)
    finally:
        engine.close()
