"""Simulates the BatchManager on a workload in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from run_pictures import RunPictures, bad_input, console, positive

from batch_manager import (
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    WaitingQueuePolicy,
)
from batch_manager.simulate import (
    CostModel,
    DeviceFigures,
    LinearCost,
    ModelFigures,
    OfferedRequest,
    RooflineCost,
    ServiceLevel,
    Simulation,
    SimulationError,
    azure,
    burst_gpt,
    faster,
    fit_cost,
    log_normal,
    mooncake,
    recorded,
    synthetic,
    take,
    with_max_new_tokens,
)
from batch_manager.trace import TraceReader
from engine_build.command_line import run


class Format(StrEnum):
    """How arrivals are written."""

    TRACE = "trace"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    BURSTGPT = "burstgpt"


PUBLISHED: dict[Format, Callable[..., Iterator[OfferedRequest]]] = {
    Format.MOONCAKE: mooncake,
    Format.AZURE: azure,
    Format.BURSTGPT: burst_gpt,
}


def main(
    arrivals: Annotated[Path | None, typer.Argument(help="File of arrivals; without one they are made up.")] = None,
    format: Annotated[Format, typer.Option(help="Of the file of arrivals.")] = Format.TRACE,
    rate: Annotated[float, typer.Option(help="Requests a second (Poisson), without a file.")] = 10.0,
    prompt_length: Annotated[
        float, typer.Option(callback=positive, help="Median, log-normal, without a file.")
    ] = 200.0,
    output_length: Annotated[
        float, typer.Option(callback=positive, help="Median, log-normal, without a file.")
    ] = 100.0,
    num_requests: Annotated[int | None, typer.Option(min=1, help="So many; 1000 without a file, else all.")] = None,
    speed: Annotated[float, typer.Option(help="Let so many times as many arrive a second.")] = 1.0,
    length_scale: Annotated[
        float, typer.Option(callback=positive, help="Scale all lengths of a published trace.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="What each request asks for, however soon it ends.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Fit the cost model to this recorded trace.")] = None,
    scatter: Annotated[
        bool, typer.Option("--scatter", help="Let the steps of a fitted model scatter as the measured ones did.")
    ] = False,
    cost: Annotated[
        Path | None, typer.Option(help='JSON: {"linear": {...}} or {"model": {...}, "device": {...}}.')
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences in an iteration.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Rows in an iteration.")] = None,
    capacity_policy: Annotated[
        str | None, typer.Option(help="GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH.")
    ] = None,
    chunking_policy: Annotated[str | None, typer.Option(help="FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS.")] = None,
    queue_policy: Annotated[WaitingQueuePolicy | None, typer.Option(help="Who is looked at first.")] = None,
    long_prompt_cap: Annotated[int | None, typer.Option(help="Tokens of one prompt in an iteration.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks.")] = None,
    tokens_per_block: Annotated[int | None, typer.Option(help="Positions a block holds.")] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(callback=positive, help="Seconds to the first token, for the goodput.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(callback=positive, help="Seconds for each later token, on average.")
    ] = None,
    slo_e2e: Annotated[float | None, typer.Option(callback=positive, help="Seconds from arrival to end.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the run as a page.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write the run as a trace file for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the iteration table as CSV.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the iteration table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    max_iterations: Annotated[int, typer.Option(min=1, help="Iterations in the page and the trace file.")] = 5000,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests in the page and the trace file.")] = 1000,
) -> None:
    """Run the scheduler on ARRIVALS and report what users would have felt.

    ARRIVALS is a recorded trace (then its limits and policies, and a cost model fitted to it, are the defaults), or a
    published one (--format). Ends with 2 for bad input.
    """
    pictures = RunPictures(
        ServiceLevel(slo_ttft, slo_tpot, slo_e2e), html, chrome, csv, table, max_iterations, max_requests
    )
    is_recorded = arrivals is not None and format is Format.TRACE
    with bad_input(arrivals):
        config, kv_config = BatchManagerConfig(), KvCacheConfig(num_blocks=4096, tokens_per_block=32)
        if arrivals is not None and is_recorded:
            with TraceReader(arrivals) as reader:
                config = reader.header.config
                kv_config = reader.header.kv_config or kv_config
        config = replace(
            config,
            **_given(
                max_batch_size=max_batch_size,
                max_num_tokens=max_num_tokens,
                capacity_scheduler_policy=_enum(CapacitySchedulerPolicy, capacity_policy),
                context_chunking_policy=_enum(ContextChunkingPolicy, chunking_policy),
                waiting_queue_policy=queue_policy,
                long_prompt_cap=long_prompt_cap,
            ),
        )
        kv_config = replace(kv_config, **_given(num_blocks=num_blocks, tokens_per_block=tokens_per_block))
        model = cost_model(fit or (arrivals if is_recorded and cost is None else None), cost, scatter)
        offered: Iterator[OfferedRequest]
        if arrivals is None:
            lengths = log_normal(prompt_length, 0.8, 100_000), log_normal(output_length, 0.7, 10_000)
            offered = synthetic(rate, *lengths)
            num_requests = num_requests or 1000
        elif is_recorded:
            offered = iter(recorded(arrivals))
        else:
            offered = PUBLISHED[format](arrivals, length_scale=length_scale)
        if num_requests is not None:
            offered = take(offered, num_requests)
        if max_new_tokens is not None:
            offered = with_max_new_tokens(offered, max_new_tokens)
        needs_kv = config.capacity_scheduler_policy is not CapacitySchedulerPolicy.MAX_REQUESTS
        simulation = Simulation(config, kv_config if needs_kv else None, model, pictures.observers)
        with console.status("simulating"):
            simulation.run(faster(offered, speed))
        if arrivals is not None and not pictures.rows.rows and not simulation.num_held_back:
            raise SimulationError(f"{arrivals}: no request in this file")
    pictures.write("synthetic workload" if arrivals is None else arrivals.name)
    pictures.print_report(as_json)
    if simulation.num_held_back:
        console.print(f"{simulation.num_held_back} requests were made only when others had left the full queue")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _enum(kind: type[CapacitySchedulerPolicy] | type[ContextChunkingPolicy], name: str | None) -> Any:
    if name is None:
        return None
    if name not in kind.__members__:
        raise SimulationError(f"{name} is no {kind.__name__}; expected one of {', '.join(kind.__members__)}")
    return kind[name]


DEFAULT_MODEL = ModelFigures(8.03e9, num_layers=32, num_attention_heads=32, num_kv_heads=8, head_size=128)
DEFAULT_COST = RooflineCost(
    DEFAULT_MODEL,
    DeviceFigures(989e12, 4.8e12, compute_efficiency=0.6, memory_efficiency=0.8, step_overhead=0.0005),
)
"""Llama 3.1 8B in bfloat16 on an H200 (989 TFLOP/s dense, 4.8 TB/s), at usual efficiencies."""


def cost_model(fit: Path | None, cost: Path | None, scatter: bool) -> CostModel:
    if fit is not None:
        with bad_input(fit):
            fitted = fit_cost(fit)
        console.print(
            f"cost model fitted to {fitted.num_steps} steps of {fit.name}, mean error {fitted.mean_error:.1%}: "
            + json.dumps({"linear": asdict(fitted.cost)}),
            markup=False,
        )
        return fitted.scattered() if scatter else fitted.cost
    if cost is None:
        console.print("cost model: roofline of Llama 3.1 8B on an H200; --fit or --cost for another one")
        return DEFAULT_COST
    try:
        match json.loads(cost.read_text(encoding="utf-8")):
            case {"linear": dict(linear)}:
                return LinearCost(**linear)
            case {"model": dict(model), "device": dict(device)}:
                return RooflineCost(ModelFigures(**model), DeviceFigures(**device))
    except (TypeError, ValueError) as error:  # no JSON, no text, or names and numbers that are none of a model's
        raise SimulationError(f"{cost}: {error}") from error
    raise SimulationError(f'{cost}: expected {{"linear": {{...}}}} or {{"model": {{...}}, "device": {{...}}}}')


if __name__ == "__main__":
    run(main, "scripts/simulate")
