"""KV blocks below the device, seen from outside: answers stay the same wherever a prefix has been meanwhile."""

from __future__ import annotations

import errno
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from batch_manager import Request as ScheduledRequest
from batch_manager import WaitCode
from batch_manager.kv import CacheTier, OwnerKind
from batch_manager.trace import replay
from executor import Executor, InvalidRequestError, KvCacheConfig, PinQuotaExceededError
from executor.kv_tiers.disk_pool import FILE_NAME, slot_bytes
from tests.executor.driving import OpenExecutor, finish, request, run, run_one, wait_until

NUM_BLOCKS = 16
"""Of 4 tokens: two prompts of 32 tokens push each other out."""


def prompt(seed: int, num_tokens: int = 32) -> list[int]:
    return [(seed * 37 + position * 11) % 90 + 3 for position in range(num_tokens)]


def open_tiered(
    open_executor: OpenExecutor,
    *,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    disk_dir: Path | None = None,
    **fields: object,
) -> Executor:
    plain = open_executor()
    block_bytes = plain.spec.kv_bytes_per_block
    plain.shutdown()
    return open_executor(
        kv_cache_config=KvCacheConfig(
            max_tokens=NUM_BLOCKS * 4,
            host_cache_size=host_blocks * block_bytes,
            disk_cache_size=disk_blocks * slot_bytes(block_bytes),
            disk_cache_dir=None if disk_dir is None else str(disk_dir),
        ),
        max_batch_size=4,
        **fields,
    )


def rest(executor: Executor) -> None:
    """Wait until no copy is on its way."""

    def is_at_rest() -> bool:
        transfers = executor._kv.cache.transfers
        with executor._loop.batch_manager_lock:
            return transfers is None or not transfers.in_flight

    wait_until(is_at_rest)


@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(64, 0), (0, 64), (8, 64)])
def test_a_prompt_that_was_offloaded_gives_the_same_answer_from_its_blocks(
    open_executor: OpenExecutor, tmp_path: Path, host_blocks: int, disk_blocks: int
) -> None:
    expected = [run_one(open_executor(), request(prompt(seed))).output_token_ids for seed in range(6)]
    tiered = open_tiered(open_executor, host_blocks=host_blocks, disk_blocks=disk_blocks, disk_dir=tmp_path)
    for _ in range(2):
        for seed in range(6):
            result = run_one(tiered, request(prompt(seed)))
            assert result.output_token_ids == expected[seed]
            rest(tiered)
    assert result.usage.reused_tokens >= 28
    assert tiered._kv.stats().onboarded_blocks > 0


def test_a_prompt_comes_back_although_another_one_runs(open_executor: OpenExecutor) -> None:
    """Copies and steps overlap: neither waits for the other, and nothing is mixed up."""
    plain = open_executor()
    expected = [run_one(plain, request(prompt(seed), 8)).output_token_ids for seed in range(5)]
    tiered = open_tiered(open_executor, host_blocks=64)
    for _ in range(4):
        together = run(tiered, *(request(prompt(seed), 8) for seed in range(5)))
        assert [responses[-1].result.output_token_ids for responses in together] == expected
    rest(tiered)
    ledger = tiered.kv_ledger()
    assert ledger.onboarded_blocks > 0
    assert (ledger.failed_transfers, ledger.counts.used, ledger.counts.leased) == (0, 0, 0)
    tiered._kv.check_invariants()


@pytest.mark.parametrize("kind", ["damaged", "short file"])
def test_a_block_that_the_disk_lost_is_computed_again_and_reported_once(
    open_executor: OpenExecutor, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiered = open_tiered(open_executor, disk_blocks=64, disk_dir=tmp_path)
    expected = []
    for seed in range(3):
        expected.append(run_one(tiered, request(prompt(seed))).output_token_ids)
        rest(tiered)
    file = tmp_path / FILE_NAME
    if kind == "damaged":
        file.write_bytes(bytes(file.stat().st_size))
    else:
        file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert run_one(tiered, request(prompt(0))).output_token_ids == expected[0]
        rest(tiered)
    ledger = tiered.kv_ledger()
    assert ledger.failures_by_kind[kind] == ledger.failed_transfers > 1
    assert sum(kind in record.message for record in caplog.records) == 1
    assert tiered.get_latest_iteration_stats()[-1].kv_cache_stats.failures_by_kind[kind] >= 1
    assert run_one(tiered, request(prompt(1))).output_token_ids == expected[1]
    tiered._kv.check_invariants()


def test_a_full_disk_costs_hits_and_nothing_else(open_executor: OpenExecutor, tmp_path: Path) -> None:
    tiered = open_tiered(open_executor, disk_blocks=64, disk_dir=tmp_path)
    disk = tiered._kv_upkeep._mover._stores[CacheTier.DISK]
    disk.write = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space left on device"))
    for seed in (0, 1, 2, 0):
        assert len(run_one(tiered, request(prompt(seed))).output_token_ids[0]) == 12
        rest(tiered)
    ledger = tiered.kv_ledger()
    assert ledger.failures_by_kind == {"ENOSPC": ledger.failed_transfers}
    assert ledger.disk.used_blocks == 0


def test_the_loop_wakes_when_a_block_arrives_and_not_at_the_next_tick(
    open_executor: OpenExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.loop._IDLE_TICK", 30.0)
    tiered = open_tiered(open_executor, host_blocks=64)
    for seed in (0, 1, 2):
        run_one(tiered, request(prompt(seed)))
        rest(tiered)
    started = time.monotonic()
    assert run_one(tiered, request(prompt(0))).usage.reused_tokens >= 28
    assert time.monotonic() - started < 15


def test_a_request_that_is_cancelled_while_its_blocks_load_leaves_nothing_behind(open_executor: OpenExecutor) -> None:
    tiered = open_tiered(open_executor, host_blocks=64)
    for seed in (0, 1, 2):
        run_one(tiered, request(prompt(seed)))
        rest(tiered)
    host = tiered._kv_upkeep._mover._stores[CacheTier.HOST]
    may_go, view = threading.Event(), host.view
    host.view = lambda slot: may_go.wait(30) and view(slot)
    request_id = tiered.enqueue_request(request(prompt(0)))
    wait_until(lambda: any(entry.kind is OwnerKind.TRANSFER for entry in tiered.kv_ledger().entries))
    reason = tiered.explain_request(request_id)
    assert reason is None or reason.code is WaitCode.KV_LOADING
    tiered.cancel_request(request_id)
    assert finish(tiered, request_id)[-1].is_final
    may_go.set()
    rest(tiered)
    assert tiered.kv_ledger().counts[1] == tiered.kv_ledger().counts[3] == 0
    assert run_one(tiered, request(prompt(0))).usage.reused_tokens >= 28


def test_a_directory_in_use_is_refused_and_what_a_dead_process_left_is_removed(
    open_executor: OpenExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(bytes(3 << 20))
    with caplog.at_level(logging.WARNING):
        first = open_tiered(open_executor, disk_blocks=8, disk_dir=tmp_path)
    assert "3 MiB that a process which has ended left" in caplog.text
    with pytest.raises(InvalidRequestError, match="in use by another executor"):
        open_tiered(open_executor, disk_blocks=8, disk_dir=tmp_path)
    assert len(run_one(first, request(prompt(0))).output_token_ids[0]) == 12
    first.shutdown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disk_cache_size": 1 << 20}, "disk_cache_dir is not set"),
        ({"host_cache_size": 8}, "host_cache_size is 8; a block takes"),
        ({"host_cache_size": 1 << 60}, "GiB are left beside the pool's"),
        ({"disk_cache_size": 1 << 60, "disk_cache_dir": "/proc"}, "disk_cache_dir /proc cannot be used"),
        ({"host_cache_size": 1 << 20, "enable_block_reuse": False}, "enable_block_reuse is off"),
        ({"secondary_offload_min_priority": 101}, r"must be in \[0, 100\]"),
        ({"max_pinned_fraction": 1.5}, r"must be in \[0, 1\]"),
    ],
)
def test_tiers_that_cannot_be_are_refused_by_name(
    open_executor: OpenExecutor, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_executor(kv_cache_config=KvCacheConfig(**fields))


def test_the_arithmetic_of_the_tiers_is_logged_at_the_start(
    open_executor: OpenExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        open_tiered(open_executor, host_blocks=64, disk_blocks=32, disk_dir=tmp_path)
    assert "64 KV blocks in the host tier (256 tokens): host_cache_size" in caplog.text
    assert "32 KV blocks in the disk tier (128 tokens): disk_cache_size" in caplog.text


def test_a_leak_found_when_idle_is_reported_with_its_owner_and_the_server_lives(
    open_executor: OpenExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(max_tokens=NUM_BLOCKS * 4))
    with executor._loop.batch_manager_lock:
        assert executor._kv.allocate(ScheduledRequest(77, [5] * 12, 1), 12) == []
    with caplog.at_level(logging.ERROR):
        run_one(executor, request(prompt(0, 8)))
        wait_until(lambda: executor.kv_ledger().quarantined_blocks == 3)
    assert "3 KV blocks leaked, held by request 77" in caplog.text
    run_one(executor, request(prompt(0, 8)))
    assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.leaked_blocks == 3
    assert sum("leaked" in record.message for record in caplog.records) == 1
    kinds = {entry.kind for entry in executor.kv_ledger().entries}
    assert OwnerKind.QUARANTINE in kinds


def test_a_pinned_prefix_stays_in_the_pool_within_its_quota(open_executor: OpenExecutor) -> None:
    executor = open_executor(
        kv_cache_config=KvCacheConfig(max_tokens=NUM_BLOCKS * 4, max_pinned_fraction=0.5), max_batch_size=4
    )
    with pytest.raises(InvalidRequestError, match="no full block of this prefix is cached"):
        executor.pin_prefix(prompt(0))
    run_one(executor, request(prompt(0), 2))
    pin = executor.pin_prefix(prompt(0))
    assert (pin.num_tokens, len(pin.block_ids), pin.seconds_left) == (32, 8, None)
    for seed in range(1, 5):
        run_one(executor, request(prompt(seed, 20), 2))
    assert run_one(executor, request(prompt(0), 2)).usage.reused_tokens >= 28
    with pytest.raises(PinQuotaExceededError, match="8 of at most 8 are pinned"):
        executor.pin_prefix(prompt(4, 20))
    assert executor.kv_ledger().pins == (pin,)
    executor.unpin_prefix(pin.pin_id)
    with pytest.raises(InvalidRequestError, match=f"pin {pin.pin_id} is not there"):
        executor.unpin_prefix(pin.pin_id)
    brief = executor.pin_prefix(prompt(4, 20), duration=timedelta(milliseconds=20))
    assert brief.seconds_left is not None
    assert brief.seconds_left <= 0.02


def test_a_run_with_tiers_is_replayed_without_a_difference(open_executor: OpenExecutor, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    tiered = open_tiered(open_executor, host_blocks=32, trace_path=trace)
    for _ in range(2):
        run(tiered, *(request(prompt(seed), 4) for seed in range(5)))
    tiered.shutdown()
    result = replay(trace)
    assert result.difference is None, str(result.difference)
