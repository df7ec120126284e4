"""The tiers below the pool: how fast blocks move, and the time to first token of a prompt that comes from there."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_engine import demo_engine

from batch_manager.kv import BlockTransfer, CacheTier
from executor import Executor, ExecutorConfig, KvCacheConfig, Request
from executor.engines.open import engine_spec, open_engine
from executor.kv_tiers import open_mover
from executor.kv_tiers.disk_pool import slot_bytes

NUM_BLOCKS = 64
POOL_BLOCKS = 72
"""One prompt of 2,016 tokens fits, a second one pushes it out."""
ROUTES = {
    "offload_to_host": (CacheTier.DEVICE, CacheTier.HOST),
    "onboard_from_host": (CacheTier.HOST, CacheTier.DEVICE),
    "spill_to_disk": (CacheTier.HOST, CacheTier.DISK),
    "onboard_from_disk": (CacheTier.DISK, CacheTier.DEVICE),
}


class FirstTokens(NamedTuple):
    """Seconds to the first token."""

    cold: list[float]
    cached: list[float]


def copy_speeds(repeats: int) -> dict[str, float]:
    """GB/s of each route, and of a plain copy of as many bytes in main memory: the best of some repeats."""
    with tempfile.TemporaryDirectory() as directory:
        engine = open_engine(demo_engine(), num_blocks=NUM_BLOCKS)
        mover = open_mover(engine, NUM_BLOCKS, NUM_BLOCKS, directory)
        assert mover is not None
        mover.start(lambda: None)
        size = engine.spec.kv_bytes_per_block
        num_bytes = NUM_BLOCKS * size
        for block in range(NUM_BLOCKS):
            engine.write_block(block, np.full(size, block, np.uint8))
        speeds: dict[str, float] = {}
        for _ in range(repeats):
            for name, (source, target) in ROUTES.items():
                started = time.perf_counter()
                mover.submit(
                    BlockTransfer(block, source, block, target, block, b"%32d" % block) for block in range(NUM_BLOCKS)
                )
                finished = []
                while len(finished) < NUM_BLOCKS:
                    time.sleep(0.0005)
                    finished += mover.take_finished()
                if not all(succeeded for _, succeeded in finished):
                    raise SystemExit(f"bench_kv: {name} failed: {mover.failures()}")
                speeds[name] = max(speeds.get(name, 0.0), num_bytes / (time.perf_counter() - started) / 1e9)
            plain, copy = np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
            started = time.perf_counter()
            np.copyto(copy, plain)
            speeds["memcpy"] = max(speeds.get("memcpy", 0.0), num_bytes / (time.perf_counter() - started) / 1e9)
        mover.close()
        engine.close()
    return speeds


def first_tokens(tier: str, rounds: int, prefix_tokens: int, question_tokens: int) -> FirstTokens:
    """Each round computes a prefix, pushes it out with another one, and asks a second question behind it."""
    source = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [source.randrange(100, 40000) for _ in range(count)]

    times = FirstTokens([], [])
    with tempfile.TemporaryDirectory() as directory, _opened(tier, Path(directory)) as executor:
        for _ in range(rounds):
            prefix = tokens(prefix_tokens)
            times.cold.append(_first_token(executor, prefix + tokens(question_tokens))[0])
            times.cold.append(_first_token(executor, tokens(prefix_tokens + question_tokens))[0])
            seconds, reused = _first_token(executor, prefix + tokens(question_tokens))
            times.cached.append(seconds)
            if reused < prefix_tokens - 32 or not executor.kv_ledger().onboarded_blocks:
                raise SystemExit(f"bench_kv: only {reused} tokens of the prefix came back from the {tier} tier")
    return times


def _opened(tier: str, directory: Path) -> Executor:
    kv = KvCacheConfig(max_tokens=POOL_BLOCKS * 32)
    size = slot_bytes(engine_spec(demo_engine()).kv_bytes_per_block) * 8 * POOL_BLOCKS
    if tier == "host":
        kv.host_cache_size = size
    else:
        kv.disk_cache_size, kv.disk_cache_dir = size, str(directory)
    return Executor(demo_engine(), ExecutorConfig(kv_cache_config=kv, max_batch_size=4))


def _first_token(executor: Executor, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds, and the tokens found in the cache. Waits until no copy is on its way before."""
    while any(entry.kind == "transfer" for entry in executor.kv_ledger().entries):
        time.sleep(0.01)
    started = time.perf_counter()
    (response,) = executor.await_responses(executor.enqueue_request(Request(list(prompt), 1)))
    return time.perf_counter() - started, response.result.usage.reused_tokens


def median_ratio(times: FirstTokens) -> float:
    return statistics.median(times.cached) / statistics.median(times.cold)
