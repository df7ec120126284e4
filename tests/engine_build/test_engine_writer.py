"""An engine directory is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engine_build.checkpoint import Checkpoint
from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from engine_build.engine_writer import engine_writer
from tests.engine_build.engines import build_tiny_engine, tiny_gguf

_REPOSITORY = Path(__file__).parent.parent.parent
_SLOW_BUILD = """
import signal, sys, time
from pathlib import Path
from engine_build.cli.console import one_line_errors
from engine_build.engine_writer import engine_writer
signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell are started without
with one_line_errors(), engine_writer(Path(sys.argv[1])) as writer:
    (writer.directory / "model.onnx").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_gguf(tmp_path_factory.mktemp("checkpoint"))


def _slow_build(output_dir: Path) -> subprocess.Popen[str]:
    """A process that holds a half-written engine; returns once it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_BUILD, str(output_dir)],
        cwd=_REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    output_dir = tmp_path / "engine"
    with suppress(KeyError), engine_writer(output_dir) as writer:
        (writer.directory / "model.onnx").write_bytes(b"half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with _slow_build(tmp_path / "engine") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert said == "engine-build: error: interrupted, nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_no_engine_and_the_next_one_cleans_up(tmp_path: Path, checkpoint: Checkpoint) -> None:
    output_dir = tmp_path / "engine"
    with _slow_build(output_dir) as process:
        process.kill()
        process.communicate(timeout=30)
    assert not output_dir.exists()
    assert len(list(tmp_path.iterdir())) == 1
    build_tiny_engine(checkpoint, output_dir)
    assert list(tmp_path.iterdir()) == [output_dir]


def test_a_build_does_not_clean_up_after_one_that_is_running(tmp_path: Path, checkpoint: Checkpoint) -> None:
    output_dir = tmp_path / "engine"
    with _slow_build(output_dir) as process:
        build_tiny_engine(checkpoint, output_dir)
        assert len(list(tmp_path.iterdir())) == 2
        process.terminate()
        process.communicate(timeout=30)
    assert list(tmp_path.iterdir()) == [output_dir]
    EngineDirectory.open(output_dir, verify=True)


def test_an_engine_is_replaced_as_a_whole(tmp_path: Path, checkpoint: Checkpoint) -> None:
    output_dir = tmp_path / "engine"
    build_tiny_engine(checkpoint, output_dir)
    (output_dir / "left_over").touch()
    build_tiny_engine(checkpoint, output_dir)
    assert not (output_dir / "left_over").exists()
    assert list(tmp_path.iterdir()) == [output_dir]


def test_an_engine_stays_until_its_successor_is_whole(tmp_path: Path, checkpoint: Checkpoint) -> None:
    output_dir = tmp_path / "engine"
    build_tiny_engine(checkpoint, output_dir)
    with engine_writer(output_dir) as writer:
        (writer.directory / "model.onnx").write_bytes(b"half")
        EngineDirectory.open(output_dir, verify=True)
    EngineDirectory.open(output_dir, verify=True)


def test_an_empty_directory_may_be_filled(tmp_path: Path, checkpoint: Checkpoint) -> None:
    output_dir = tmp_path / "engine"
    output_dir.mkdir()
    build_tiny_engine(checkpoint, output_dir)
    EngineDirectory.open(output_dir)


def test_missing_parents_are_made(tmp_path: Path, checkpoint: Checkpoint) -> None:
    build_tiny_engine(checkpoint, tmp_path / "a" / "b" / "engine")
    EngineDirectory.open(tmp_path / "a" / "b" / "engine")


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path, checkpoint: Checkpoint) -> None:
    first, second = (build_tiny_engine(checkpoint, tmp_path / name).manifest for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("name", ["file", "link", "full"])
def test_what_is_no_engine_is_never_replaced(tmp_path: Path, checkpoint: Checkpoint, name: str) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    with pytest.raises(EngineDirectoryError, match=r"is no directory|holds something that is not an engine"):
        build_tiny_engine(checkpoint, tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "full" / "precious").exists()


def test_a_parent_that_is_a_file_is_named(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineDirectoryError, match="cannot write to"):
        build_tiny_engine(checkpoint, tmp_path / "file" / "engine")


def test_a_finished_engine_has_the_usual_permissions(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "plain").mkdir()
    build_tiny_engine(checkpoint, tmp_path / "engine")
    assert (tmp_path / "engine").stat().st_mode == (tmp_path / "plain").stat().st_mode
