"""scripts/simulate and scripts/replay, as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch_manager.test_trace_replay import record_two_requests

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_workload_is_simulated_and_drawn(tmp_path: Path) -> None:
    html, chrome = tmp_path / "run.html", tmp_path / "run.json"
    finished = run("simulate_workload.py", "--num-requests", 50, "--json", "--html", html, "--chrome", chrome)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["num_ended"] == {"LENGTH": 50}
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(chrome.read_text())["traceEvents"]


def test_a_recorded_trace_is_replayed_and_its_table_printed(tmp_path: Path) -> None:
    trace, table = tmp_path / "run.jsonl", tmp_path / "table.csv"
    record_two_requests(trace)
    finished = run("replay_trace.py", trace, "--table", "--csv", table)
    assert finished.returncode == 0, finished.stderr
    assert "3 iterations of 2 requests replayed: no difference" in finished.stderr
    assert "generation" in finished.stdout
    assert len(table.read_text().splitlines()) == 7


def test_a_replay_that_differs_ends_with_1_and_names_the_difference(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    record_two_requests(trace)
    trace.write_text(trace.read_text().replace('"max_batch_size":4', '"max_batch_size":1'))
    finished = run("replay_trace.py", trace)
    assert finished.returncode == 1
    assert "first difference: line 4, iteration 0, request 2" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.jsonl"], "No such file or directory: 'missing.jsonl'"),
        (["--capacity-policy", "FIFO"], "FIFO is no CapacitySchedulerPolicy; expected one of MAX_UTILIZATION"),
        (["--num-blocks", 0], "num_blocks is 0; it must be at least 1"),
        (["--rate", 0], "rate is 0.0 requests a second; it must be above 0"),
        (["--cost", SCRIPTS / "simulate"], "Expecting value"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(arguments: list[object], complaint: str) -> None:
    finished = run("simulate_workload.py", *arguments)
    assert finished.returncode == 2
    assert complaint in finished.stderr.splitlines()[-1]


def test_the_cost_model_can_be_given_as_a_file(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"linear": {"constant": 2.0}}')
    arguments = ["--num-requests", 1, "--output-length", 3, "--json", "--cost", cost]
    report = json.loads(run("simulate_workload.py", *arguments).stdout)
    assert report["time_to_first_token"]["max"] == 2.0
