"""The directory that Dynamo's frontend reads a model from: tokenizer, chat template, and what a `config.json` says.

The frontend tokenizes and renders chats itself, so a worker registers a directory in the shape of a Hugging Face
checkpoint, without weights. It is made beside nothing and owned by nobody else: a temporary directory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine_build.engine_dir import EngineDirectory
from executor.api.errors import UnsupportedFeatureError


def write_model_directory(manifest: EngineDirectory, max_seq_len: int, directory: Path) -> None:
    """Write it.

    Args:
        manifest: the engine directory.
        max_seq_len: tokens a request may have, prompt and output.
        directory: exists, and is empty.

    Raises:
        UnsupportedFeatureError: the engine directory has no tokenizer.
    """
    if manifest.tokenizer_dir is None:
        raise UnsupportedFeatureError(
            "the engine directory has no tokenizer, which Dynamo's frontend needs; build it from a checkpoint with one"
        )
    for path in manifest.tokenizer_dir.iterdir():
        shutil.copy2(path, directory / path.name)
    model = manifest.model_config
    end_ids = list(model.eos_token_ids)
    config = {
        "architectures": [model.architecture],
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": max_seq_len,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": end_ids,
        "torch_dtype": model.dtype,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": model.bos_token_id, "eos_token_id": end_ids}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
