"""An engine directory of a tiny random Llama whose tokens are bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint.interface import TokenizerFiles
from engine_build.targets.select import select_target
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.serving.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer


class ByteCheckpoint(TinyCheckpoint):
    """A tiny checkpoint with a tokenizer."""

    def __init__(self) -> None:
        super().__init__(tiny_config(vocab_size=VOCAB_SIZE))

    def tokenizer_files(self) -> TokenizerFiles:
        with tempfile.TemporaryDirectory() as directory:
            written = write_byte_tokenizer(Path(directory) / "tokenizer")
            return TokenizerFiles({path.name: path.read_bytes() for path in written.iterdir()})


def build_tiny_engine(engine_dir: Path, target: str = "openvino") -> Path:
    """Write it and return its path."""
    checkpoint = ByteCheckpoint()
    chosen = select_target(target)
    build_config = resolve_build_config(
        checkpoint.config, chosen, max_batch_size=16, max_num_tokens=64, max_seq_len=256, dtype="float32"
    )
    build_engine(checkpoint, build_config, chosen, engine_dir, lambda _stage, _done, _total: None)
    return engine_dir
