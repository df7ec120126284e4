"""What each package may import, as docs/architecture.md says; the order of our own packages is import-linter's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
OURS = {"batch_manager", "engine_build", "executor", "protos"}
ALLOWED = {
    "batch_manager": {"numpy"},
    "protos": {"google", "grpc"},
    "engine_build": {
        "cuda",
        "gguf",
        "ml_dtypes",
        "numpy",
        "onnx",
        "openvino",
        "rich",
        "safetensors",
        "tokenizers",
        "triton",
        "typer",
    },
}
HEAVY = {"torch", "openvino", "llguidance", "transformers", "triton"}
"""Imported only where used, never by importing the package."""


def imported_packages(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_the_architecture_allows(package: str) -> None:
    for path in (REPOSITORY / package).rglob("*.py"):
        foreign = imported_packages(path) - set(sys.stdlib_module_names) - OURS - ALLOWED[package]
        assert not foreign, f"{path.relative_to(REPOSITORY)} imports {', '.join(sorted(foreign))}"


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_batch_manager_loads_nothing_but_numpy() -> None:
    foreign = modules_after("import batch_manager") - set(sys.stdlib_module_names) - modules_after("import numpy")
    assert foreign == {"batch_manager"}


@pytest.mark.parametrize("package", ["executor", "engine_build", "engine_build.cli", "executor.cli"])
def test_importing_a_package_loads_no_heavy_library(package: str) -> None:
    assert not modules_after(f"import {package}") & HEAVY


def test_a_script_that_runs_outside_the_environment_imports_the_standard_library_only() -> None:
    """Started by name, a script has whatever Python the machine has; what needs more goes through `setup_env`."""
    scripts = [path for path in (REPOSITORY / "scripts").iterdir() if path.is_file() and not path.suffix]
    in_python = [path for path in scripts if "python" in path.read_text(encoding="utf-8").splitlines()[0]]
    assert {path.name for path in in_python} >= {"fetch_model", "proto_gen"}
    for path in in_python:
        foreign = imported_packages(path) - set(sys.stdlib_module_names)
        assert not foreign, f"scripts/{path.name} imports {', '.join(sorted(foreign))}"
