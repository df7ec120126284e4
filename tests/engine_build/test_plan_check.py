"""A plan that does not fit this machine is refused in one line, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from engine_build.targets.interface import TensorRtOptions
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.device import Device
from engine_build.targets.tensorrt.plan_check import check_device, check_plan_here, check_version, check_whole
from executor.api.errors import UnsupportedFeatureError
from executor.engines.open import open_engine, pool_memory
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_ADA = Device("NVIDIA GeForce RTX 4090", "8.9", 24 << 30)
_HOPPER = Device("NVIDIA H100", "9.0", 80 << 30)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    target = select_target("tensorrt-rtx")
    checkpoint = TinyCheckpoint(tiny_config(num_hidden_layers=1))
    build_config = resolve_build_config(
        checkpoint.config, target, max_num_tokens=16, max_seq_len=64, tensorrt=TensorRtOptions(("8.6", "8.9"))
    )
    return build_engine(checkpoint, build_config, target, tmp_path_factory.mktemp("plan") / "engine")


def _edited(engine: EngineDirectory, directory: Path, **build_config: Any) -> EngineDirectory:
    """The same plan with another manifest."""
    directory.mkdir()
    content = json.loads((engine.path / "config.json").read_text())
    content["build_config"] |= build_config
    content["files"]["rank1.engine"] = content["files"]["rank0.engine"]
    for name in ("rank0.engine", "rank1.engine"):
        (directory / name).hardlink_to(engine.path / "rank0.engine")
    (directory / "config.json").write_text(json.dumps(content))
    return EngineDirectory.open(directory)


def test_another_version_is_named_with_what_would_do(engine: EngineDirectory) -> None:
    built = engine.manifest.builder_versions["tensorrt_rtx"]
    check_version(engine, built)
    said = (
        rf"built with tensorrt_rtx {built}, 1\.2\.0 is installed: build it again, or pip install 'tensorrt-rtx-cu13=="
    )
    with pytest.raises(EngineDirectoryError, match=said):
        check_version(engine, "1.2.0")


def test_another_device_is_named_with_what_would_do(engine: EngineDirectory) -> None:
    check_device(engine, _ADA)
    said = (
        r"built for compute capability 8\.6, 8\.9, NVIDIA H100 has 9\.0: build it again with --compute_capability 9\.0"
    )
    with pytest.raises(EngineDirectoryError, match=said):
        check_device(engine, _HOPPER)


def test_a_plan_for_several_devices_is_refused(engine: EngineDirectory, tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match="built for 2 devices, an Executor runs one"):
        check_whole(_edited(engine, tmp_path / "engine", tp_size=2))


def test_a_plan_without_weights_is_refused(engine: EngineDirectory, tmp_path: Path) -> None:
    assert engine.build_config.tensorrt is not None
    settings = dataclasses.asdict(engine.build_config.tensorrt) | {"strip_plan": True}
    with pytest.raises(EngineDirectoryError, match="was built with --strip_plan: it has no weights"):
        check_whole(_edited(engine, tmp_path / "engine", tensorrt=settings))


def test_a_plan_that_runs_nowhere_here_is_refused_before_a_gpu_is_looked_for(
    engine: EngineDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.engines.open._gpu", lambda _options: pytest.fail("a GPU is looked for"))
    other = dataclasses.replace(engine.manifest, builder_versions={"tensorrt_rtx": "1.2.0"})
    with pytest.raises(EngineDirectoryError, match=r"built with tensorrt_rtx 1\.2\.0, "):
        pool_memory(dataclasses.replace(engine, manifest=other))
    with pytest.raises(EngineDirectoryError, match="built for 2 devices"):
        pool_memory(_edited(engine, tmp_path / "engine", pp_size=2))


def test_without_a_gpu_opening_ends_before_anything_is_loaded(engine: EngineDirectory) -> None:
    with pytest.raises(UnsupportedFeatureError, match="no NVIDIA GPU can be used here"):
        open_engine(engine, num_blocks=4)


def test_other_bytes_are_found_once_there_is_a_device(
    engine: EngineDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_build.targets.tensorrt.plan_check.find_device", lambda _index: _ADA)
    assert check_plan_here(engine) == _ADA
    copy = tmp_path / "engine"
    copy.mkdir()
    content = bytearray((engine.path / "rank0.engine").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "rank0.engine").write_bytes(content)
    (copy / "config.json").write_bytes((engine.path / "config.json").read_bytes())
    with pytest.raises(EngineDirectoryError, match=r"rank0\.engine is not what was written \(its checksum differs\)"):
        check_plan_here(EngineDirectory.open(copy))
