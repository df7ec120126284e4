"""The generated modules are those of the .proto files."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GENERATED_WITH = "1.76.0"


def installed_tools() -> str | None:
    try:
        return importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(installed_tools() != GENERATED_WITH, reason=f"needs grpcio-tools {GENERATED_WITH}")
def test_generating_again_changes_nothing() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "proto_gen", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_loads_under_protobuf_6_and_7() -> None:
    """Gencode newer than the runtime refuses to load; Triton's client pins protobuf 6."""
    for path in (ROOT / "protos" / "inflight" / "v1").glob("*_pb2.py"):
        match = re.search(r"Protobuf Python Version: (\d+)\.", path.read_text())
        assert match is not None
        assert int(match[1]) <= 6


@pytest.mark.parametrize("path", sorted((ROOT / "protos").rglob("*.proto")), ids=lambda path: path.name)
def test_every_enum_begins_with_unspecified_and_no_field_is_a_map(path: Path) -> None:
    text = path.read_text()
    for name, first in re.findall(r"^enum (\w+) \{\n(?:\s*//.*\n)*\s*(\w+) = 0;", text, re.MULTILINE):
        assert first == re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_UNSPECIFIED"
    assert len(re.findall(r"^enum ", text, re.MULTILINE)) == len(re.findall(r"_UNSPECIFIED = 0;", text))
    assert "map<" not in text


def buf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Buf beside the interpreter; PyPI's buf-bin brings it."""
    command = [str(Path(sys.executable).parent / "buf"), *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_proto_files_keep_bufs_rules() -> None:
    done = buf("lint", ROOT / "protos")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_that_was_published_changed_on_the_wire() -> None:
    done = buf("breaking", ROOT / "protos", "--against", ROOT / "protos" / "baseline.binpb")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("  bool streaming = 7;", "  string streaming = 7;", "changed type"),
        ("  bool streaming = 7;", "", "deleted"),
        ("  FINISH_REASON_LENGTH = 3;", "  FINISH_REASON_LONG = 3;", "changed name"),
    ],
)
def test_a_change_on_the_wire_is_found(tmp_path: Path, before: str, after: str, said: str) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    path = tmp_path / "protos" / "inflight" / "v1" / "inference.proto"
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    done = buf("breaking", tmp_path / "protos", "--against", ROOT / "protos" / "baseline.binpb")
    assert done.returncode != 0
    assert said in done.stdout
