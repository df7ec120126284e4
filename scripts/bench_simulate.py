"""Simulates many requests with the production BatchManager and measures speed and memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from batch_manager import BatchManagerConfig, KvCacheConfig
from batch_manager.simulate import (
    LinearCost,
    OfferedRequest,
    RunMetrics,
    RunReport,
    ServiceLevel,
    Simulation,
    log_normal,
    synthetic,
    take,
)
from engine_build.command_line import run

COST = LinearCost(constant=0.006, per_context_token=2e-5, per_generation_row=2e-5, per_kv_token=1e-9, overhead=0.0001)
"""About an 8B model on a data-centre GPU."""
RATE = 200.0


def main(
    quick: Annotated[bool, typer.Option("--quick", help="20,000 requests instead of a million.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
    num_requests: Annotated[int | None, typer.Option(help="So many requests.")] = None,
) -> None:
    """Offer requests of about 100 + 24 tokens, 200 a second, to a batch of up to 256."""
    total = num_requests or (20_000 if quick else 1_000_000)
    metrics = RunMetrics(ServiceLevel(time_to_first_token=1.0, time_per_output_token=0.05))
    config = BatchManagerConfig(max_batch_size=256, max_num_tokens=2048)
    simulation = Simulation(config, KvCacheConfig(num_blocks=8000, tokens_per_block=16), COST, [metrics])
    offered = take(synthetic(RATE, log_normal(100, 0.8, 1000), log_normal(24, 0.7, 200)), total)
    wall, cpu = time.perf_counter(), time.process_time()
    with Progress(
        "simulated",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task("", total=total)
        simulation.run(_counted(offered, lambda count: progress.update(task, completed=count)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report = RunReport.of(metrics)
    if sum(report.num_ended.values()) != total:
        print(f"{total} requests were offered, {report.num_ended} ended", file=sys.stderr)
        raise typer.Exit(1)
    figures = {
        "num_requests": total,
        "seconds": round(wall, 2),
        "requests_per_s": round(total / wall, 1),
        "requests_per_cpu_s": round(total / cpu, 1),
        "us_per_seq_step": round(cpu / metrics.num_scheduled_sequences * 1e6, 2),
        "virtual_seconds": round(report.duration, 1),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(report.table())
    print(
        f"{total} requests in {wall:.1f} s: {figures['requests_per_s']} a second, "
        f"{figures['us_per_seq_step']} us of CPU a sequence and step, {figures['rss_mib']} MiB at most"
    )
    if as_json:
        print(json.dumps(figures))


def _counted(offered: Iterator[OfferedRequest], tell: Callable[[int], None]) -> Iterator[OfferedRequest]:
    count = 0
    for count, request in enumerate(offered, start=1):
        if count % 1000 == 0:
            tell(count)
        yield request
    tell(count)


if __name__ == "__main__":
    run(main, "scripts/bench_simulate")
