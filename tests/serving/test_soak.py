"""`scripts/soak`: 64 streams and clients that leave, against a real server process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("minutes", "disconnects"), [pytest.param(0.12, 60), pytest.param(10.0, 1000, marks=pytest.mark.long)]
)
def test_every_request_ends_once_and_nothing_is_left_behind(minutes: float, disconnects: int) -> None:
    command = [sys.executable, ROOT / "scripts" / "soak.py", "--json", "--minutes", str(minutes)]
    done = subprocess.run([*command, "--disconnects", str(disconnects)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["requests"] > 64
    assert report["disconnects"] == disconnects
    assert report["disconnected_live"] > disconnects / 4
    assert report["rss_growth_mib"] < 100
