"""The memory a dry run prints, against the files and pools that a build and an engine really have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint import open_checkpoint
from engine_build.memory import estimate_memory
from engine_build.targets.select import select_target
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import SMALL, write_gguf, write_hugging_face


def _constant_bytes(model_path: Path) -> int:
    graph = onnx.load(model_path, load_external_data=False).graph
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    return sum(int(entry["length"]) for entry in entries if entry)


@pytest.mark.parametrize("type_", [GgmlType.F32, GgmlType.Q8_0, GgmlType.Q4_1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", ["as_stored", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_take_exactly_what_was_estimated(
    tmp_path: Path, type_: GgmlType, dtype: str, weight_dtype: str, tied: bool
) -> None:
    config = replace(SMALL, tie_word_embeddings=tied, attention_bias=not tied)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, type_))
    target = select_target("reference")
    build_config = resolve_build_config(config, target, dtype=dtype, weight_dtype=weight_dtype)
    engine = build_engine(checkpoint, build_config, target, tmp_path / "engine")
    assert estimate_memory(checkpoint, build_config, target).weights == _constant_bytes(engine.model_path)


def test_kv_bytes_count_keys_and_values_of_all_layers_and_the_scales_of_8_bit_rows(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=3, num_key_value_heads=2, head_size=16)
    checkpoint = open_checkpoint(write_hugging_face(tmp_path, config))
    target = select_target("openvino")
    build_config = resolve_build_config(config, target, max_seq_len=100)
    default, eight_bit = estimate_memory(checkpoint, build_config, target).kv_cache
    assert (default.dtype, default.bytes_per_token) == ("bfloat16", 2 * 3 * 2 * 16 * 2)
    assert default.bytes_per_block == 32 * default.bytes_per_token
    assert default.bytes_for_one_sequence == 4 * default.bytes_per_block
    assert (eight_bit.dtype, eight_bit.bytes_per_token) == ("uint8", 2 * 3 * 2 * (16 + 8))


def test_no_weight_is_read_for_an_estimate(tmp_path: Path) -> None:
    """A checkpoint larger than memory can still be asked about: only headers are touched."""
    directory = write_hugging_face(tmp_path, tiny_config())
    checkpoint = open_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    target = select_target("openvino")
    assert estimate_memory(checkpoint, resolve_build_config(checkpoint.config, target), target).weights > 0
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == 128


def test_the_workspace_grows_with_the_rows_of_a_step(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hugging_face(tmp_path, tiny_config()))
    target = select_target("openvino")
    small, large = (
        estimate_memory(checkpoint, resolve_build_config(checkpoint.config, target, max_num_tokens=rows), target)
        for rows in (128, 256)
    )
    logits = 64 * 128 * 4
    assert large.workspace - logits == 2 * (small.workspace - logits)
