"""Simulates a cluster of instances in virtual time: one layout, or all of them over load."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from run_pictures import bad_input, console, positive
from simulate_workload import DEFAULT_MODEL, PUBLISHED, Format, cost_model

from batch_manager import BatchManagerConfig, KvCacheConfig
from batch_manager.pictures import cluster_page, goodput_svg
from batch_manager.simulate import (
    Cluster,
    ClusterMetrics,
    ClusterReport,
    CostModel,
    Death,
    InstanceSpec,
    Layout,
    NetworkFigures,
    OfferedRequest,
    Role,
    RouterPolicy,
    ServiceLevel,
    SimulationError,
    faster,
    layouts,
    log_normal,
    recorded,
    sweep,
    synthetic,
    take,
)
from engine_build.command_line import require_folder_of, run

Number = TypeVar("Number", int, float)


def main(
    arrivals: Annotated[Path | None, typer.Argument(help="File of arrivals; without one they are made up.")] = None,
    format: Annotated[Format, typer.Option(help="Of the file of arrivals.")] = Format.TRACE,
    num_requests: Annotated[int, typer.Option(min=1, help="The first so many.")] = 1000,
    length_scale: Annotated[
        float, typer.Option(callback=positive, help="Scale all lengths of a published trace.")
    ] = 1.0,
    prompt_length: Annotated[
        float, typer.Option(callback=positive, help="Median, log-normal, without a file.")
    ] = 1000.0,
    output_length: Annotated[
        float, typer.Option(callback=positive, help="Median, log-normal, without a file.")
    ] = 200.0,
    instances: Annotated[int, typer.Option(help="So many, in every layout; not with --roles.")] = 4,
    roles: Annotated[
        str | None, typer.Option(help="One layout only: CONTEXT,GENERATION,BOTH, such as 1,3,0; prints its report.")
    ] = None,
    load: Annotated[
        str, typer.Option(help="Requests a second offered, several separated by commas.")
    ] = "4,8,12,16,20,24,28,32",
    router: Annotated[RouterPolicy, typer.Option(help="How an instance is chosen.")] = RouterPolicy.KV_AWARE,
    bandwidth: Annotated[float, typer.Option(help="GB/s of an instance's port, each way.")] = 50.0,
    fabric: Annotated[float, typer.Option(help="GB/s of all transfers together.")] = math.inf,
    latency: Annotated[float, typer.Option(help="Seconds that a transfer takes beyond its bytes.")] = 0.001,
    kv_bytes_per_token: Annotated[float, typer.Option(help="On the network.")] = DEFAULT_MODEL.kv_bytes_per_token,
    die: Annotated[
        list[str] | None, typer.Option(help="TIME:INSTANCE, seconds and number from 0, with --roles; may be repeated.")
    ] = None,
    cost: Annotated[
        Path | None, typer.Option(help='JSON: {"linear": {...}} or {"model": {...}, "device": {...}}.')
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences in an iteration.")] = 256,
    max_num_tokens: Annotated[int, typer.Option(help="Rows in an iteration.")] = 8192,
    num_blocks: Annotated[int, typer.Option(help="KV blocks of an instance.")] = 13_000,
    tokens_per_block: Annotated[int, typer.Option(help="Positions a block holds.")] = 64,
    slo_ttft: Annotated[float, typer.Option(callback=positive, help="Seconds to the first token.")] = 0.5,
    slo_tpot: Annotated[
        float, typer.Option(callback=positive, help="Seconds for each later token, on average.")
    ] = 0.02,
    attainment: Annotated[float, typer.Option(help="Share of the requests that must be served within these.")] = 0.9,
    html: Annotated[Path | None, typer.Option(help="Write goodput over load as a page; not with --roles.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write goodput over load as a picture; not with --roles.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve the same requests with every layout of so many instances, at several loads, and recommend one.

    The blocks' default is 109 GB of an 8B model's keys and values. Ends with 2 for bad input.
    """
    with bad_input(arrivals):
        require_folder_of(html)
        require_folder_of(svg)
        loads = _numbers("--load", load, float)
        offered = _requests(arrivals, format, num_requests, length_scale, prompt_length, output_length)
        if not offered:
            raise SimulationError(f"{arrivals}: no request in this file")
        model = cost_model(None, cost, False)
        level = ServiceLevel(slo_ttft, slo_tpot)
        network = NetworkFigures(bandwidth * 1e9, latency, fabric * 1e9)
        config = BatchManagerConfig(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
        kv_config = KvCacheConfig(num_blocks=num_blocks, tokens_per_block=tokens_per_block)
        deaths = [_death(text) for text in die or ()]

        def run(layout: Layout, load: float) -> ClusterReport:
            specs = _specs(layout, config, kv_config, model)
            cluster = Cluster(specs, kv_bytes_per_token, network, router, ClusterMetrics(level), deaths)
            with console.status(f"{layout.name} at {load:g} requests/s"):
                cluster.run(_at_load(offered, load))
            return ClusterReport.of(cluster)

        if roles is not None:
            if html is not None or svg is not None or len(loads) != 1:
                raise SimulationError("--roles is one layout at one --load, without --html and --svg")
            layout = Layout(*_numbers("--roles", roles, int, 3))
            report = run(layout, loads[0])
            print(json.dumps(report.to_json()) if as_json else report.table())
            return
        if deaths:
            raise SimulationError("--die goes with --roles: layouts differ in which instances they have")
        result = sweep(run, layouts(instances), loads, attainment)
    if html is not None:
        name = "made-up requests" if arrivals is None else arrivals.name
        facts = (
            f"the first {len(offered)} of {name}; first token within {slo_ttft:g} s, then {slo_tpot * 1e3:g} ms a "
            f"token; ports of {bandwidth:g} GB/s; router {router}"
        )
        page = cluster_page(result, f"{instances} instances: goodput over load", facts)
        with bad_input():
            html.write_text(page, encoding="utf-8")
        console.print(f"wrote {html}")
    if svg is not None:
        with bad_input():
            svg.write_text(goodput_svg(result), encoding="utf-8")
        console.print(f"wrote {svg}")
    print(json.dumps(result.to_json()) if as_json else result.table())


def _requests(
    arrivals: Path | None,
    format: Format,
    num_requests: int,
    length_scale: float,
    prompt_length: float,
    output_length: float,
) -> list[OfferedRequest]:
    """All requests, at their own speed."""
    if arrivals is None:
        lengths = log_normal(prompt_length, 0.8, 100_000), log_normal(output_length, 0.7, 10_000)
        return list(take(synthetic(1.0, *lengths), num_requests))
    source = recorded(arrivals) if format is Format.TRACE else PUBLISHED[format](arrivals, length_scale=length_scale)
    offered = list(take(source, num_requests))
    if len(offered) < 2 or offered[-1].arrival_time <= offered[0].arrival_time:
        raise SimulationError(
            f"{arrivals} has {len(offered)} requests; a load needs two that arrive at different times"
        )
    return offered


def _at_load(offered: Sequence[OfferedRequest], load: float) -> list[OfferedRequest]:
    """The requests, from time 0, `load` a second on average."""
    begin = offered[0].arrival_time
    rate = (len(offered) - 1) / (offered[-1].arrival_time - begin)
    from_zero = (request._replace(arrival_time=request.arrival_time - begin) for request in offered)
    return list(faster(from_zero, load / rate))


def _specs(
    layout: Layout, config: BatchManagerConfig, kv_config: KvCacheConfig, model: CostModel
) -> list[InstanceSpec]:
    counts = zip((Role.CONTEXT, Role.GENERATION, Role.BOTH), layout, strict=True)
    return [InstanceSpec(role, config, kv_config, model) for role, count in counts for _ in range(count)]


def _numbers(option: str, text: str, kind: type[Number], count: int | None = None) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or count not in (None, len(numbers)) or min(numbers) < 0:
        raise SimulationError(f"{option} is {text}; expected {count or 'one or more'} numbers separated by commas")
    return numbers


def _death(text: str) -> Death:
    time, _, instance = text.partition(":")
    try:
        return Death(float(time), int(instance))
    except ValueError:
        raise SimulationError(f"--die is {text}; expected TIME:INSTANCE, such as 12.5:0") from None


if __name__ == "__main__":
    run(main, "scripts/simulate_cluster")
