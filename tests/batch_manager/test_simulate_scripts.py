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
    ("script", "arguments", "complaint"),
    [
        ("simulate_workload.py", ["missing.jsonl"], "error: missing.jsonl: No such file or directory"),
        ("simulate_workload.py", [SCRIPTS], f"error: {SCRIPTS}: Is a directory"),
        ("simulate_workload.py", ["{binary}"], "error: {binary}: not a text file in UTF-8"),
        ("simulate_workload.py", ["--fit", "{binary}"], "error: {binary}: not a text file in UTF-8"),
        ("simulate_workload.py", ["{binary}.gz"], "error: {binary}.gz: Not a gzipped file"),
        ("simulate_workload.py", ["--cost", SCRIPTS / "simulate"], f"error: {SCRIPTS / 'simulate'}: Expecting value"),
        (
            "simulate_workload.py",
            ["--format", "azure", SCRIPTS / "one_line_parser.py"],
            "parser.py, line 2: expected",
        ),
        ("simulate_workload.py", ["--html", "/missing/a.html"], "error: /missing: no such folder to write into"),
        ("simulate_workload.py", ["--capacity-policy", "FIFO"], "FIFO is no CapacitySchedulerPolicy; expected one of"),
        ("simulate_workload.py", ["--num-blocks", 0], "num_blocks is 0; it must be at least 1"),
        ("simulate_workload.py", ["--rate", 0], "rate is 0.0 requests a second; it must be above 0"),
        ("simulate_workload.py", ["--rate", "fast"], "'--rate'"),
        ("simulate_workload.py", ["--slo-ttft", "nan"], "nan is not a finite number above 0 (see scripts/simulate"),
        ("simulate_workload.py", ["--num-requests", -3], "'--num-requests'"),
        ("simulate_cluster_load.py", ["missing.jsonl"], "error: missing.jsonl: No such file or directory"),
        ("simulate_cluster_load.py", ["--svg", "/missing/a.svg"], "error: /missing: no such folder to write into"),
        ("simulate_cluster_load.py", ["--num-requests", 0], "'--num-requests'"),
        ("replay_trace.py", ["missing.jsonl"], "error: missing.jsonl: No such file or directory"),
        ("replay_trace.py", ["{binary}"], "error: {binary}: not a text file in UTF-8"),
        ("replay_trace.py", [], "(see scripts/replay --help)"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(
    script: str, arguments: list[object], complaint: str, tmp_path: Path
) -> None:
    binary = tmp_path / "binary"
    for path in (binary, binary.with_suffix(".gz")):
        path.write_bytes(b"a\xff\xfe")
    finished = run(script, *(str(each).replace("{binary}", str(binary)) for each in arguments))
    assert finished.returncode == 2, finished.stderr
    assert complaint.replace("{binary}", str(binary)) in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr
    assert sum("error: " in line for line in finished.stderr.splitlines()) == 1


def test_the_cost_model_can_be_given_as_a_file(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"linear": {"constant": 2.0}}')
    arguments = ["--num-requests", 1, "--output-length", 3, "--json", "--cost", cost]
    report = json.loads(run("simulate_workload.py", *arguments).stdout)
    assert report["time_to_first_token"]["max"] == 2.0
