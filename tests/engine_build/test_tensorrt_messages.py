"""What a build says and keeps: interruption, reasons, timing caches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.interface import TargetError
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.messages import explain
from engine_build.targets.tensorrt.timing_cache import read_timing_cache, write_timing_cache
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config


def test_ctrl_c_while_a_plan_is_built_ends_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(stage: str, _done: int, _total: int) -> None:
        if stage.startswith("compiling: "):
            raise KeyboardInterrupt

    target, checkpoint = select_target("tensorrt-rtx"), TinyCheckpoint(tiny_config(num_hidden_layers=1))
    build_config = resolve_build_config(checkpoint.config, target, max_num_tokens=16, max_seq_len=64)
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, build_config, target, tmp_path / "engine", interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([], "it gives no reason"),
        (["Error 4:\n shapes differ", "more"], "Error 4: shapes differ"),
        (["Error 2: OutOfMemory (Requested size was 9)"], "not enough memory: lower max_batch_size or max_seq_len"),
        (["cannot compile", "contains HW-specific datatypes: fp4"], "has no hardware for weight_dtype"),
    ],
)
def test_a_builders_errors_become_one_line_that_says_what_to_do(errors: list[str], said: str) -> None:
    line = explain(errors)
    assert said in line
    assert "\n" not in line


class _Config:
    """An `IBuilderConfig` as far as timing caches go, which takes those that begin with `good`."""

    def __init__(self) -> None:
        self.cache: bytes | None = None

    def create_timing_cache(self, content: bytes) -> bytes:
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return not cache or cache.startswith(b"good")

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache)


def test_timings_go_from_one_build_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "timings"
    first, second = _Config(), _Config()
    read_timing_cache(first, None)
    first.cache = b"good timings"
    write_timing_cache(first, path)
    read_timing_cache(second, path)
    assert second.cache == b"good timings"
    assert list(tmp_path.iterdir()) == [path]


def test_timings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"cannot read --input_timing_cache .*nowhere: No such file"):
        read_timing_cache(_Config(), tmp_path / "nowhere")
    (tmp_path / "other").write_bytes(b"of another version")
    with pytest.raises(TargetError, match="holds timings of another TensorRT version or device: leave it out"):
        read_timing_cache(_Config(), tmp_path / "other")
