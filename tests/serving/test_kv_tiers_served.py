"""A server with tiers below its pool, as a process: filled, looked into, pinned, killed and ended."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from executor.api.errors import InvalidRequestError, RequestError
from executor.cli import app
from executor.client import Finished, InferenceClient
from executor.kv_tiers.disk_pool import FILE_NAME
from tests.serving.server_process import serving
from tests.serving.tiny_engine_dir import build_tiny_engine

POOL_TOKENS = 256
"""8 blocks of 32 tokens."""


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


def answer(client: InferenceClient, prompt: list[int]) -> Finished:
    events = list(client.generate(prompt, max_tokens=4, ignore_eos=True, timeout=60))
    return next(event for event in events if isinstance(event, Finished))


def prompt(seed: int) -> list[int]:
    return [(seed * 37 + position * 11) % 200 + 3 for position in range(200)]


def test_blocks_go_down_and_come_back_and_the_account_says_so(engine_dir: Path, tmp_path: Path) -> None:
    options = ("--kv_cache_max_tokens", str(POOL_TOKENS), "--host_cache_size", str(1 << 20))
    options += ("--disk_cache_size", str(1 << 22), "--disk_cache_dir", str(tmp_path))
    with serving(engine_dir, *options) as (process, target):
        with InferenceClient(target) as client:
            for seed in (0, 1, 2, 0):
                usage = answer(client, prompt(seed)).usage
                while any(entry.owner.startswith("transfer") for entry in client.kv_ledger(timeout=10).entries):
                    time.sleep(0.01)
            assert usage.reused_tokens >= 192
            pin = client.pin_prefix(prompt(0)[:64], seconds=60, timeout=10)
            assert pin.num_tokens == 64
            with pytest.raises(RequestError, match="are pinned already"):
                client.pin_prefix(prompt(0), timeout=10)
            with pytest.raises(InvalidRequestError, match="pin 99 is not there"):
                client.unpin_prefix(99, timeout=10)
        shown = CliRunner().invoke(app, ["kv", target])
        ledger = json.loads(CliRunner().invoke(app, ["kv", target, "--json"]).output)
        assert (tmp_path / FILE_NAME).exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "pool: " in shown.output
    assert f"pin {pin.pin_id}: 64 tokens" in shown.output
    assert int(ledger["transfers"]["onboarded"]) >= 6
    assert int(ledger["transfers"].get("failed", 0)) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_server_that_was_killed_is_removed_by_the_next(engine_dir: Path, tmp_path: Path) -> None:
    options = ("--disk_cache_size", str(1 << 22), "--disk_cache_dir", str(tmp_path))
    with serving(engine_dir, *options) as (process, _):
        process.kill()
        process.wait()
        assert (tmp_path / FILE_NAME).stat().st_size > 0
    with serving(engine_dir, *options) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert "that a process which has ended left there" in errors
    assert list(tmp_path.iterdir()) == []


def test_nobody_to_ask_is_one_line_and_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["kv", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
