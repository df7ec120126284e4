"""What a build may be asked for, and what it fills in by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_build import __version__
from engine_build.builder import BuildError, build_engine, resolve_build_config
from engine_build.checkpoint import open_checkpoint
from engine_build.manifest import BuildConfig
from engine_build.network import NetworkError
from engine_build.targets.interface import CompileOptions, TargetError
from engine_build.targets.select import select_target
from tests.engine_build.engines import build_tiny_engine, tiny_gguf
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import write_hugging_face

_REPOSITORY = Path(__file__).parent.parent.parent


def test_what_is_left_open_comes_from_the_model_and_the_target() -> None:
    model = tiny_config(max_position_embeddings=512)
    assert resolve_build_config(model, select_target("openvino")) == BuildConfig(
        max_batch_size=64,
        max_num_tokens=256,
        max_input_len=511,
        max_seq_len=512,
        tokens_per_block=32,
        dtype="bfloat16",
        weight_dtype="as_stored",
    )
    assert resolve_build_config(model, select_target("reference")).dtype == "float32"


def test_a_small_token_budget_bounds_the_batch_as_well() -> None:
    assert resolve_build_config(tiny_config(), select_target("openvino"), max_num_tokens=16).max_batch_size == 16


@pytest.mark.parametrize(
    ("target", "settings", "error", "said"),
    [
        ("openvino", {"max_seq_len": 2048}, BuildError, "max_seq_len 2048 is beyond the model's 1024 positions"),
        ("openvino", {"max_input_len": 1024}, BuildError, "max_input_len 1024 leaves no room for a generated token"),
        ("openvino", {"max_batch_size": 0}, BuildError, "max_batch_size is 0, it must be at least 1"),
        ("openvino", {"max_num_tokens": -5}, BuildError, "max_num_tokens is -5, it must be at least 1"),
        ("openvino", {"max_seq_len": 1}, BuildError, "max_input_len is 0, it must be at least 1"),
        (
            "openvino",
            {"max_batch_size": 65, "max_num_tokens": 64},
            BuildError,
            "max_batch_size 65 is above max_num_tokens 64",
        ),
        ("openvino", {"tokens_per_block": 16}, TargetError, "target openvino has blocks of 32"),
        ("openvino", {"dtype": "float16"}, TargetError, "target openvino computes in bfloat16, float32"),
        ("reference", {"dtype": "float8"}, TargetError, "target reference computes in float32, bfloat16, float16"),
        ("reference", {"tokens_per_block": 0}, BuildError, "tokens_per_block is 0, it must be at least 1"),
        ("openvino", {"weight_dtype": "int3"}, NetworkError, "weight_dtype 'int3' is unknown"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_numbers(
    target: str, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        resolve_build_config(tiny_config(), select_target(target), **settings)
    assert said in str(caught.value)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TargetError, match="target 'abacus' is unknown; supported are openvino, reference"):
        select_target("abacus")


def test_the_openvino_plan_is_compiled_when_it_is_built(tmp_path: Path) -> None:
    stages = []
    checkpoint = tiny_gguf(tmp_path)
    target = select_target("openvino")
    engine = build_engine(
        checkpoint,
        resolve_build_config(checkpoint.config, target),
        target,
        tmp_path / "engine",
        lambda stage, done, total: stages.append((stage, done, total)),
    )
    assert stages.index(("compiling the plan", 1, 1)) > stages.index(("compiling the plan", 0, 1))
    assert stages[-1] == ("writing checksums", 1, 1)
    assert {"openvino", "onnx", "numpy", "inflight-executor"} == set(engine.manifest.builder_versions)


def test_a_network_that_does_not_compile_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """OpenVINO gets a file that is no model, as after a defect in the network's writer."""
    (tmp_path / "model.onnx").write_bytes(b"no model")
    target = select_target("openvino")
    with pytest.raises(TargetError, match="OpenVINO cannot compile the network"):
        target.compile(
            tmp_path, 0, resolve_build_config(tiny_config(), target), tiny_config(), CompileOptions(), lambda *_: None
        )


def test_a_checkpoint_without_a_tokenizer_gives_an_engine_without_one(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hugging_face(tmp_path / "checkpoint", tiny_config()))
    engine = build_tiny_engine(checkpoint, tmp_path / "engine")
    assert engine.tokenizer_dir is None
    assert not (engine.path / "tokenizer").exists()


def test_the_version_is_the_projects() -> None:
    assert f'version = "{__version__}"' in (_REPOSITORY / "pyproject.toml").read_text()
