"""KV blocks below the device, seen from outside: answers stay the same wherever a prefix has been meanwhile."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from executor import Executor, InvalidRequestError, KvCacheConfig
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
