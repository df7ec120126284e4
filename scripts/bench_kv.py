"""What the KV cache costs (bookkeeping, copies) and saves (time to first token of a cached prompt)."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Annotated

import typer
from bench_engine import demo_engine
from bench_kv_bookkeeping import costs_table, measure, worst
from bench_kv_tiers import copy_speeds, first_tokens, median_ratio
from rich.console import Console

from engine_build.command_line import run
from executor import Executor, ExecutorConfig, Request

PREFIX_TOKENS = 2000
QUESTION_TOKENS = 16


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: under 50 s.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Bookkeeping with the event stream on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
) -> None:
    """Measure the bookkeeping alone, then on the CPU engine prompts of 2,000 cached tokens and 16 new ones, found
    in the pool and in the tiers below it."""
    console = Console(stderr=as_json)
    bookkeeping = measure(2 if quick else 5, events=events)
    console.print(costs_table(bookkeeping))
    cold, cached = first_token_seconds(2 if quick else 6)
    cold_ms, cached_ms = statistics.median(cold) * 1e3, statistics.median(cached) * 1e3
    ratio = cached_ms / cold_ms
    console.print(
        f"time to first token, {PREFIX_TOKENS} + {QUESTION_TOKENS} tokens: cold {cold_ms:.0f} ms, "
        f"cached {cached_ms:.0f} ms (medians of {len(cold)}), ratio {ratio:.3f}"
    )
    speeds = copy_speeds(3 if quick else 10)
    console.print("blocks moved, GB/s: " + ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()))
    tiers = {tier: first_tokens(tier, 1 if quick else 4, PREFIX_TOKENS, QUESTION_TOKENS) for tier in ("host", "disk")}
    for tier, times in tiers.items():
        console.print(
            f"the same from the {tier} tier: {statistics.median(times.cached) * 1e3:.0f} ms, cold "
            f"{statistics.median(times.cold) * 1e3:.0f} ms, ratio {median_ratio(times):.3f}"
        )
    if as_json:
        result = {
            **worst(bookkeeping),
            "ttft_cold_ms": cold_ms,
            "ttft_cached_ms": cached_ms,
            "ttft_cached_over_cold": ratio,
            **{f"ttft_{tier}_over_cold": median_ratio(times) for tier, times in tiers.items()},
            **{f"{name}_over_memcpy": speed / speeds["memcpy"] for name, speed in speeds.items() if name != "memcpy"},
            "gigabytes_per_second": speeds,
            "cases": bookkeeping,
        }
        print(json.dumps(result))


def first_token_seconds(rounds: int) -> tuple[list[float], list[float]]:
    """Cold and cached: each round has a prefix of its own, which two different questions follow."""
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(100, 40000) for _ in range(count)]

    cold, cached = [], []
    with Executor(demo_engine(), ExecutorConfig(max_batch_size=4)) as executor:
        for _ in range(rounds):
            prefix = tokens(PREFIX_TOKENS)
            for times in (cold, cached):
                started = time.perf_counter()
                request_id = executor.enqueue_request(Request(prefix + tokens(QUESTION_TOKENS), 1))
                (response,) = executor.await_responses(request_id)
                times.append(time.perf_counter() - started)
            reused = response.result.usage.reused_tokens
            if reused < PREFIX_TOKENS - 32:
                raise SystemExit(f"bench_kv: only {reused} tokens of the prefix were reused")
    return cold, cached


if __name__ == "__main__":
    run(main, "scripts/bench_kv")
