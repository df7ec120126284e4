"""The directory that Dynamo's frontend reads a model from: tokenizer, chat template, and what a `config.json` says.

The frontend tokenizes and renders chats itself, so a worker registers a directory in the shape of a Hugging Face
checkpoint, without weights. Workers whose directories differ, in content or in name, are not taken for the same model;
so it is named by its content, and lies in the user's cache, where the next worker finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from engine_build.engine_dir import EngineDirectory
from executor.api.errors import UnsupportedFeatureError


def model_directory(manifest: EngineDirectory, max_seq_len: int, cache: Path | None = None) -> Path:
    """Make it, unless it is there.

    Args:
        manifest: the engine directory.
        max_seq_len: tokens a request may have, prompt and output.
        cache: where; by default a folder of the user's cache.

    Raises:
        UnsupportedFeatureError: the engine directory has no tokenizer.
        OSError: it cannot be written.
    """
    if manifest.tokenizer_dir is None:
        raise UnsupportedFeatureError(
            "the engine directory has no tokenizer, which Dynamo's frontend needs; build it from a checkpoint with one"
        )
    files = {path.name: path.read_bytes() for path in manifest.tokenizer_dir.iterdir()}
    files |= {name: json.dumps(value, indent=2).encode() for name, value in _configs(manifest, max_seq_len).items()}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    cache = cache or Path.home() / ".cache" / "inflight-executor" / "dynamo-models"
    directory = cache / digest.hexdigest()[:32]
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _write(files, directory)
    return directory


def _write(files: dict[str, bytes], directory: Path) -> None:
    """All or nothing, also when others write the same at the same time."""
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        unfinished.chmod(0o755)
        os.rename(unfinished, directory)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not directory.exists():
            raise


def _configs(manifest: EngineDirectory, max_seq_len: int) -> dict[str, dict[str, object]]:
    """Of a Hugging Face checkpoint, what describes the model."""
    model = manifest.model_config
    end_ids = list(model.eos_token_ids)
    return {
        "config.json": {
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
        },
        "generation_config.json": {"bos_token_id": model.bos_token_id, "eos_token_id": end_ids},
    }
