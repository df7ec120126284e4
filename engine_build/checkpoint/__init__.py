"""Checkpoint readers: Hugging Face directories and GGUF files behind one interface."""

from engine_build.checkpoint.interface import (
    Checkpoint,
    CheckpointError,
    DenseTensor,
    GroupQuantizedTensor,
    Tensor,
    TokenizerFiles,
)
from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from engine_build.checkpoint.open import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DenseTensor",
    "GroupQuantizedTensor",
    "ModelConfig",
    "RopeScaling",
    "Tensor",
    "TokenizerFiles",
    "open_checkpoint",
]
