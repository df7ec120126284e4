"""Which reader a path is for."""

from __future__ import annotations

from pathlib import Path

from engine_build.checkpoint.gguf_checkpoint import GgufCheckpoint
from engine_build.checkpoint.hugging_face import HuggingFaceCheckpoint
from engine_build.checkpoint.interface import Checkpoint, CheckpointError
from engine_build.checkpoint.tensorrt_llm import TensorRtLlmCheckpoint, is_tensorrt_llm_directory


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a directory of Hugging Face or TensorRT-LLM, a GGUF file, or a directory that holds exactly one GGUF file.

    Headers are read and checked, weights are not loaded.

    Raises:
        CheckpointError: there is nothing there, or it is damaged, incomplete or of an unsupported kind.
    """
    path = Path(path)
    if path.is_file():
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: give a Hugging Face model directory or a GGUF file")
    if is_tensorrt_llm_directory(path):
        return TensorRtLlmCheckpoint(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not gguf_files:
        return HuggingFaceCheckpoint(path)
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files)
        raise CheckpointError(f"{path} holds several GGUF files, give one of them: {names}")
    return GgufCheckpoint(gguf_files[0])
