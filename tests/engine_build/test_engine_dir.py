"""Engine directories: what is built can be opened, what is damaged or foreign cannot."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from engine_build.manifest import FORMAT_VERSION
from tests.engine_build.engines import build_tiny_engine, tiny_gguf


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built")
    return build_tiny_engine(tiny_gguf(directory), directory / "engine").path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def _edit(engine: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = engine / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _refusal(engine: Path, **options: Any) -> str:
    with pytest.raises(EngineDirectoryError) as caught:
        EngineDirectory.open(engine, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_manifest_describes_the_files_beside_it(built: Path) -> None:
    engine = EngineDirectory.open(built, target="reference", verify=True)
    assert set(engine.manifest.files) == {
        "model.onnx",
        "model.data",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    for name, record in engine.manifest.files.items():
        content = (built / name).read_bytes()
        assert record.num_bytes == len(content)
        assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert engine.tokenizer_dir == built / "tokenizer"
    assert engine.model_path == built / "model.onnx"
    assert engine.target == "reference"
    assert engine.build_config.max_seq_len == 128
    assert engine.model_config.num_hidden_layers == 1
    assert engine.manifest.inputs["key_cache_0"].shape == ("num_blocks", 2, "tokens_per_block", 16)
    assert engine.manifest.inputs["input_ids"].dtype == "int64"
    assert engine.manifest.outputs["logits"].shape[-1] == 128


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert "nowhere does not exist: write one with engine-build" in _refusal(tmp_path / "nowhere")


def test_an_empty_directory_is_no_engine(tmp_path: Path) -> None:
    assert "is not an engine directory: cannot read config.json" in _refusal(tmp_path)


def test_a_checkpoint_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "has no format_version (a checkpoint? give it to engine-build)" in _refusal(tmp_path)


def test_a_manifest_cut_short_is_refused(engine: Path) -> None:
    path = engine / "config.json"
    path.write_text(path.read_text()[:200])
    assert "config.json is not valid JSON" in _refusal(engine)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, "1"])
def test_another_format_version_is_refused(engine: Path, version: object) -> None:
    _edit(engine, lambda content: content.update(format_version=version))
    assert f"has format version {version!r}, this release reads version {FORMAT_VERSION}" in _refusal(engine)


def test_an_unknown_target_is_refused(engine: Path) -> None:
    _edit(engine, lambda content: content.update(target="abacus"))
    assert "built for target 'abacus', this release knows openvino, reference" in _refusal(engine)


def test_another_target_than_the_one_needed_is_refused(built: Path) -> None:
    said = _refusal(built, target="openvino")
    assert "built for target 'reference', 'openvino' is needed: build it again with --target openvino" in said


def test_a_field_of_the_wrong_type_is_named(engine: Path) -> None:
    _edit(engine, lambda content: content["build_config"].update(max_batch_size="many"))
    assert "config.json: build_config.max_batch_size is 'many', it must be an integer" in _refusal(engine)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("build_config", "tokens_per_block"),
        ("pretrained_config", "num_key_value_heads"),
        ("pretrained_config", "head_size"),
    ],
)
def test_a_size_of_zero_is_refused_by_name(engine: Path, section: str, name: str) -> None:
    _edit(engine, lambda content: content[section].update({name: 0}))
    said = _refusal(engine)
    assert f"config.json: {section}" in said
    assert f"{name} is 0, it must be" in said


@pytest.mark.parametrize("name", ["model.onnx", "model.data", "tokenizer/tokenizer.json"])
def test_a_missing_file_is_named(engine: Path, name: str) -> None:
    (engine / name).unlink()
    assert f"lacks {name}: build it again" in _refusal(engine)


def test_a_truncated_file_is_named_with_both_sizes(engine: Path) -> None:
    path = engine / "model.data"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"model.data has {len(whole) - 1} bytes, {len(whole)} were written" in _refusal(engine)


def test_changed_bytes_are_found_when_asked_for(engine: Path) -> None:
    path = engine / "model.data"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    EngineDirectory.open(engine)
    assert "model.data is not what was written (its checksum differs)" in _refusal(engine, verify=True)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "tokenizer/../../outside"])
def test_files_outside_the_directory_are_refused(engine: Path, name: str) -> None:
    _edit(engine, lambda content: content["files"].update({name: {"num_bytes": 1, "sha256": ""}}))
    assert "lies outside the engine directory" in _refusal(engine)


@pytest.mark.parametrize("name", ["model.onnx", "model.data"])
def test_a_manifest_must_list_the_network(engine: Path, name: str) -> None:
    _edit(engine, lambda content: content["files"].pop(name))
    assert f"files lacks {name}" in _refusal(engine)
