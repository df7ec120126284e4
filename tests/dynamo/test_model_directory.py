"""The directory that Dynamo's frontend reads a model from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_build.builder import build_engine, resolve_build_config
from engine_build.engine_dir import EngineDirectory
from engine_build.targets.select import select_target
from executor.api.errors import UnsupportedFeatureError
from executor.cli import app
from executor.dynamo.model_directory import model_directory
from executor.text import Tokenizer
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.serving.tiny_engine_dir import build_tiny_engine


def build_bare_engine(engine_dir: Path) -> Path:
    """One of a checkpoint without tokenizer."""
    checkpoint, target = TinyCheckpoint(tiny_config()), select_target("openvino")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=4, max_num_tokens=64, max_seq_len=128, dtype="float32"
    )
    build_engine(checkpoint, build_config, target, engine_dir, lambda _stage, _done, _total: None)
    return engine_dir


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


def test_it_has_the_shape_of_a_checkpoint_without_weights(engine_dir: Path, tmp_path: Path) -> None:
    directory = model_directory(EngineDirectory.open(engine_dir), 256, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 256
    assert Tokenizer(directory).eos_token_ids
    assert not list(directory.glob("*.safetensors"))


def test_equal_engines_share_it_and_another_length_has_its_own(engine_dir: Path, tmp_path: Path) -> None:
    manifest = EngineDirectory.open(engine_dir)
    first, second = (model_directory(manifest, 256, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert model_directory(manifest, 128, tmp_path / "cache") != first
    assert len(list((tmp_path / "cache").iterdir())) == 2, "nothing unfinished is left"


def test_an_engine_of_token_ids_only_is_refused(tmp_path: Path) -> None:
    bare = build_bare_engine(tmp_path / "bare")
    with pytest.raises(UnsupportedFeatureError, match="has no tokenizer, which Dynamo's frontend needs"):
        model_directory(EngineDirectory.open(bare), 256, tmp_path)


def test_without_dynamo_the_command_says_how_to_get_it(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dynamo", None)
    result = CliRunner().invoke(app, ["dynamo-worker", str(engine_dir)])
    assert result.exit_code == 2
    assert "pip install 'inflight-executor[dynamo]', then pip install --no-deps 'ai-dynamo>=1.6,<1.7'" in result.output
