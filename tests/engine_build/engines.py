"""A small engine directory for tests, written by the builder itself."""

from __future__ import annotations

from pathlib import Path

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint import Checkpoint, open_checkpoint
from engine_build.engine_dir import EngineDirectory
from engine_build.targets.select import select_target
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import write_gguf


def tiny_gguf(directory: Path) -> Checkpoint:
    """A random Llama with a tokenizer."""
    return open_checkpoint(write_gguf(directory / "tiny.gguf", tiny_config(num_hidden_layers=1)))


def build_tiny_engine(checkpoint: Checkpoint, output_dir: Path, target_name: str = "reference") -> EngineDirectory:
    target = select_target(target_name)
    build_config = resolve_build_config(checkpoint.config, target, max_seq_len=128)
    return build_engine(checkpoint, build_config, target, output_dir)
