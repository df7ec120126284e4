"""A Hugging Face directory (config.json, safetensors in one file or shards, tokenizer) as a `Checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from engine_build.checkpoint.config_check import check_config
from engine_build.checkpoint.hugging_face_config import read_model_config
from engine_build.checkpoint.hugging_face_tokenizer import tokenizer_files
from engine_build.checkpoint.interface import CheckpointError, DenseTensor, Tensor, TokenizerFiles
from engine_build.checkpoint.json_file import JsonObject
from engine_build.checkpoint.safetensors_file import StoredTensor, check_dtypes, dominant_dtype, read_headers
from engine_build.checkpoint.weight_shapes import check_weights, weight_shapes

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


class HuggingFaceCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        """Read configuration and weight headers; no weight is loaded.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, or the model is one that is not supported.
        """
        self.source = str(directory)
        self._directory = directory
        if not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} has no config.json: it is not a Hugging Face model directory")
        stored = _stored_tensors(directory)
        self.config = read_model_config(directory, dominant_dtype(stored.values()))
        check_config(self.config, self.source)
        self._stored = {name: tensor for name, tensor in stored.items() if not self._is_redundant(name)}
        check_weights(self.config, {name: tensor.shape for name, tensor in self._stored.items()}, self.source)
        check_dtypes(self._stored.values())

    def names(self) -> Iterable[str]:
        return weight_shapes(self.config).keys()

    def is_group_quantized(self, name: str) -> bool:
        self._find(name)
        return False

    def tensor(self, name: str) -> Tensor:
        return DenseTensor(self._find(name).read())

    def tokenizer_files(self) -> TokenizerFiles:
        return tokenizer_files(self._directory)

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{self.source} has no weight {name}")
        return self._stored[name]

    def _is_redundant(self, name: str) -> bool:
        """Old Llama checkpoints store the rotary frequencies, some tied ones the same matrix a second time."""
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings)


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    index_path = directory / _INDEX_FILE
    if index_path.is_file():
        return _sharded(index_path)
    path = directory / _SINGLE_FILE
    if path.is_file():
        return read_headers(path)
    legacy = ", only pickled weights (*.bin), which are not read" if any(directory.glob("*.bin")) else ""
    raise CheckpointError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX_FILE}{legacy}")


def _sharded(index_path: Path) -> dict[str, StoredTensor]:
    shard_of = JsonObject.read(index_path).object("weight_map")
    if not shard_of.fields:
        raise CheckpointError(f"{index_path} has no 'weight_map'")
    shards: dict[str, dict[str, StoredTensor]] = {}
    stored = {}
    for name in shard_of.fields:
        shard = shard_of.string(name)
        if Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: shard {json.dumps(shard)} of {name} is not a plain file name")
        if shard not in shards:
            if not (index_path.parent / shard).is_file():
                raise CheckpointError(f"{index_path.parent} lacks the shard {shard} that {index_path.name} names")
            shards[shard] = read_headers(index_path.parent / shard)
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index_path.parent / shard} lacks the weight {name} that {index_path.name} puts there"
            )
        stored[name] = shards[shard][name]
    return stored
