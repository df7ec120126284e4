"""`scripts/verify_gpu` where there is no GPU to verify, and the report it writes where there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import verify_gpu  # noqa: E402
from verify_gpu import Machine, NotRunError, Outcome, Row, as_markdown, greedy_tokens, run_check  # noqa: E402


def test_without_a_gpu_one_line_and_exit_code_3(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/usr/bin/env", "bash", ROOT / "scripts" / "verify_gpu"],
        env={**os.environ, "PATH": f"{fake_nvidia_smi(tmp_path)}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == ("verify_gpu: no NVIDIA GPU was found (nvidia-smi -L lists none); nothing was verified\n")


def fake_nvidia_smi(directory: Path) -> Path:
    """A program of that name that says what the real one does without a driver."""
    program = directory / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    return directory


def test_a_check_that_cannot_run_or_breaks_is_a_row_and_not_the_end() -> None:
    def cannot() -> list[Row]:
        raise NotRunError("the package tensorrt is not installed")

    def breaks() -> list[Row]:
        raise ValueError("the driver\nsaid no")

    assert run_check("plan", cannot) == [Row("plan", Outcome.NOT_RUN, "the package tensorrt is not installed")]
    assert run_check("plan", breaks) == [Row("plan", Outcome.FAILED, "ValueError: the driver said no")]


def test_the_report_is_a_table_for_people_and_json_for_programs() -> None:
    machine = Machine("Card", "9.0", 80.0, "580.1", "3.11.9", {"torch": "2.13.0"})
    rows = [Row("one | two", Outcome.PASSED, "3 of 4 TB/s"), Row("three", Outcome.NOT_RUN, "no package")]
    text = as_markdown(machine, rows)
    assert "| one \\| two | passed | 3 of 4 TB/s |" in text
    document = json.loads(text.split("```json\n")[1].split("```")[0])
    assert document["machine"]["compute_capability"] == "9.0"
    assert [row["outcome"] for row in document["rows"]] == ["passed", "not run"]


@pytest.mark.model
@pytest.mark.long
def test_the_oracle_answers_the_prompts(demo_model_path: Path) -> None:  # noqa: ARG001
    directory = verify_gpu.engine_dir("reference", verify_gpu.TARGETS["reference"])
    tokens = greedy_tokens(directory, device="cpu")
    assert [len(answer) for answer in tokens] == [verify_gpu.NUM_TOKENS] * len(verify_gpu.PROMPTS)
