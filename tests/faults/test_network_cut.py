"""A network that is cut in the middle of a transfer: instances in network namespaces of their own, bytes over TCP."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.faults.isolated_instance import TIMEOUT

pytest.importorskip("nixl_cu12")

_WORLD = ["unshare", "-Urn"]
_TRIAL = "ip link add trial0 type veth peer name trial1 && unshare -nm mount -t sysfs sysfs /sys"


def can_make_networks() -> bool:
    try:
        return (
            subprocess.run([*_WORLD, "sh", "-c", _TRIAL], capture_output=True, check=False, timeout=20).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="module")
def findings() -> dict[str, dict[str, Any]]:
    if not can_make_networks():
        pytest.skip("this system does not let its users make network namespaces (unshare -Urn)")
    command = [*_WORLD, sys.executable, "-m", "tests.faults.network_world"]
    world = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert world.returncode == 0, world.stderr[-2000:]
    found = [json.loads(line) for line in world.stdout.splitlines()]
    return {each.pop("what"): each for each in found}


def test_contexts_come_before_the_network_is_cut(findings: dict[str, dict[str, Any]]) -> None:
    assert findings["before"]["is_whole"]
    assert findings["others before"]["is_whole"]


def test_a_cut_while_blocks_come_ends_in_recomputation_within_the_timeout(findings: dict[str, dict[str, Any]]) -> None:
    cut = findings["cut while blocks come"]
    assert not cut["is_whole"]
    assert sum(cut["recomputed"].values()) == 1
    assert cut["seconds"] < TIMEOUT + 3


def test_a_cut_before_anything_is_asked_does_too(findings: dict[str, dict[str, Any]]) -> None:
    assert not findings["cut before it is asked"]["is_whole"]
    assert findings["cut before it is asked"]["seconds"] < TIMEOUT + 3


def test_contexts_from_others_come_meanwhile(findings: dict[str, dict[str, Any]]) -> None:
    assert findings["others meanwhile"]["is_whole"]
    assert findings["others meanwhile"]["seconds"] < TIMEOUT


def test_blocks_come_back_on_both_sides(findings: dict[str, dict[str, Any]]) -> None:
    assert findings["receiver"]["missing_blocks"] == 0
    assert findings["sender"]["missing_blocks"] == 0


def test_contexts_come_again_once_the_network_is_whole(findings: dict[str, dict[str, Any]]) -> None:
    assert findings["healed"]["is_whole"]
