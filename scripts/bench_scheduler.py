"""Measures the BatchManager alone: microseconds for each sequence and step, nanoseconds for each prompt token, and
whether what waits makes a step slower.

Everything that costs something is on: fair queue with weights, MAX_UTILIZATION, overlap, block reuse, equal-progress
chunks, deadlines, adapters, receipts and reasons. Times are medians over steps, so that what else the machine does
counts little. Other schedulers are measured in between, if they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    KvCacheManager,
    Request,
    WaitingQueuePolicy,
)
from engine_build.command_line import run

SCRIPTS = Path(__file__).resolve().parent
TOKENS_PER_BLOCK = 32
VOCABULARY = 32_000
console = Console(stderr=True)


class Load:
    """A BatchManager with `num_sequences` running and `num_waiting` requests that cannot run."""

    def __init__(self, num_sequences: int, num_waiting: int, num_steps: int) -> None:
        config = BatchManagerConfig(
            max_batch_size=num_sequences,
            max_num_tokens=8192,
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
            context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS,
            chunk_unit_size=TOKENS_PER_BLOCK,
            long_prompt_cap=2048,
            waiting_queue_policy=WaitingQueuePolicy.FAIR,
            tenant_weights={"a": 1.0, "b": 2.0},
            max_steps_in_flight=2,
            num_adapter_pages=100,
        )
        blocks_per_sequence = (num_steps + 100) // TOKENS_PER_BLOCK + 1
        kv = KvCacheManager(KvCacheConfig(num_sequences * blocks_per_sequence, TOKENS_PER_BLOCK))
        self.manager = BatchManager(config, kv)
        chance = random.Random(num_sequences)
        for index in range(num_sequences + num_waiting):
            self.manager.add_request(
                Request(
                    index,
                    [chance.randrange(5, VOCABULARY) for _ in range(16 + index % 33)],
                    num_steps + 40,
                    end_id=2,
                    stop_token_ids=(3, 4),
                    tenant="ab"[index % 2],
                    arrival_time=time.monotonic(),
                    allotted_time=3600.0,
                    adapter_id=index % 4,
                    adapter_pages=8,
                )
            )
        self.in_flight = deque([self.manager.schedule()])
        while len(self.in_flight[0].scheduled) < num_sequences or not all(
            entry.samples for entry in self.in_flight[0].scheduled
        ):
            self.step(5)

    def step(self, token: int) -> float:
        """Plan an iteration while one is in flight, then finish that one; returns the seconds of both."""
        oldest = self.in_flight[0]
        sampled = [[token] if entry.samples else [] for entry in oldest.scheduled]
        begin = time.perf_counter()
        self.in_flight.append(self.manager.schedule())
        self.manager.update(oldest, sampled)
        seconds = time.perf_counter() - begin
        self.in_flight.popleft()
        return seconds


def us_per_sequence_step(num_sequences: int, num_steps: int) -> float:
    load = Load(num_sequences, 100, num_steps)
    return median(load.step(5 + step) for step in range(num_steps)) / num_sequences * 1e6


def waiting_over_none(num_waiting: int, num_steps: int) -> float:
    """A step's time with many waiting requests over the time without, steps of both taken in turn."""
    without, with_waiting = Load(64, 0, num_steps), Load(64, num_waiting, num_steps)
    pairs = [(without.step(5 + step), with_waiting.step(5 + step)) for step in range(num_steps)]
    return median(pair[1] for pair in pairs) / median(pair[0] for pair in pairs)


def ns_per_prompt_token(num_prompts: int) -> float:
    """From `add_request` to the first token, for prompts of 4096 tokens that nothing else runs beside."""
    manager = BatchManager(
        BatchManagerConfig(max_num_tokens=8192), KvCacheManager(KvCacheConfig(1024, TOKENS_PER_BLOCK))
    )
    chance = random.Random(1)
    times = []
    for index in range(num_prompts):
        request = Request(index, [chance.randrange(VOCABULARY) for _ in range(4096)], 1)
        begin = time.perf_counter()
        manager.add_request(request)
        manager.update(manager.schedule(), [[5]])
        times.append((time.perf_counter() - begin) / request.num_prompt_tokens)
    return median(times) * 1e9


def peer_us_per_sequence_step(module: str, script: str, num_steps: int) -> tuple[float | None, str]:
    """What another scheduler takes at 64 sequences, and a note if there is no figure."""
    if importlib.util.find_spec(module) is None:
        return None, f"{module} is not installed"
    command = [sys.executable, str(SCRIPTS / script), "64", str(num_steps)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        return None, f"{module} could not be measured: {result.stderr.strip().splitlines()[-1]}"
    return json.loads(result.stdout.splitlines()[-1])["us_per_seq_step"], ""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON object.")] = False,
) -> None:
    """Measure the scheduler; the last line of the output is one JSON object."""
    num_steps, num_repeats = (60, 2) if quick else (200, 5)
    console.quiet = as_json
    by_size: dict[str, float] = {}
    for size in track((64, 256, 1024), "sequences", console=console):
        by_size[str(size)] = min(us_per_sequence_step(size, num_steps) for _ in range(num_repeats))
    peers: dict[str, float | None] = {}
    notes = []
    for name, module in (("vllm", "vllm"), ("nano_vllm", "nanovllm")):
        peer, note = peer_us_per_sequence_step(module, f"bench_scheduler_{name}.py", num_steps)
        peers[name] = peer
        notes += [note] if note else []
    figures = {
        "us_per_seq_step": {size: round(value, 3) for size, value in by_size.items()},
        "ns_per_prompt_token": round(ns_per_prompt_token(50 if quick else 200), 1),
        "waiting_10000_over_0": round(min(waiting_over_none(10_000, num_steps) for _ in range(num_repeats)), 3),
        **{f"us_per_seq_step_{name}": peer and round(peer, 3) for name, peer in peers.items()},
        **{f"ratio_vs_{name}": peer and round(peer / by_size["64"], 3) for name, peer in peers.items()},
        "notes": notes,
    }
    if not as_json:
        table = Table("figure", "value", "bound")
        for size, value in by_size.items():
            table.add_row(f"us per sequence and step, {size} running", f"{value:.2f}", "3")
        table.add_row("ns per prompt token", f"{figures['ns_per_prompt_token']:.0f}", "300")
        table.add_row("step with 10,000 waiting, over none", f"{figures['waiting_10000_over_0']:.3f}", "1.10")
        for name in peers:
            table.add_row(f"times faster than {name}, 64 running", str(figures[f"ratio_vs_{name}"]), "")
        Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    run(main, "scripts/bench_scheduler")
