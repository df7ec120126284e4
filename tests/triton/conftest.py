"""Servers that tests share. The server's files are installed on first use; where they cannot be, tests are skipped."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.triton.repository import RepositoryOptions, write_repository
from tests.serving.tiny_engine_dir import build_tiny_engine
from tests.triton.server import ROOT, TritonServer, fake_executor_command, running


@pytest.fixture(scope="session")
def triton_files() -> None:
    """What `scripts/setup_triton` installs."""
    done = subprocess.run([ROOT / "scripts" / "setup_triton"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        pytest.skip(f"scripts/setup_triton failed with status {done.returncode}: {reason[0]}")
    importlib.invalidate_caches()  # the client's folder may be new, and was missing when it was put on the path


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes."""
    return build_tiny_engine(tmp_path_factory.mktemp("triton-engine") / "engine")


@pytest.fixture(scope="session")
def server(
    triton_files: None,  # noqa: ARG001 - the fixture is what is needed
    tiny_engine: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """All five models, decoupled, on the tiny engine."""
    directory = tmp_path_factory.mktemp("triton")
    repository = directory / "repository"
    options = ["triton-repo", tiny_engine, "--output", repository]
    options += ["--parameter", "cancellation_check_period_ms=20", "--parameter", "stats_check_period_ms=20"]
    command = Path(sys.executable).with_name("executor")
    subprocess.run([str(part) for part in (command, *options)], check=True, capture_output=True)
    with running(repository, directory / "log") as started:
        yield started


@pytest.fixture
def fake_repository(triton_files: None, tmp_path: Path) -> Path:  # noqa: ARG001
    """`tensorrt_llm` alone, decoupled, on an Executor that makes a token every 10 ms."""
    return write_fake_repository(tmp_path, "--step-seconds", "0.01")


def write_fake_repository(
    directory: Path,
    *options: str,
    decoupled: bool = True,
    instance_count: int = 1,
    disaggregated: bool = False,
    cancellation_check_period_ms: int = 20,
) -> Path:
    periods = {"cancellation_check_period_ms": cancellation_check_period_ms, "stats_check_period_ms": 20}
    repository = directory / "repository"
    write_repository(
        repository,
        RepositoryOptions(
            engine_dir=directory,
            tokenizer_dir=None,
            executor_command=fake_executor_command(directory, *options),
            decoupled=decoupled,
            instance_count=instance_count,
            is_disaggregated=disaggregated,
            parameters={name: str(milliseconds) for name, milliseconds in periods.items()},
        ),
    )
    return repository
