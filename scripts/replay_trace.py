"""Replays a recorded trace, compares every plan with the recorded one, and draws the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from run_pictures import RunPictures, bad_input, console, positive

from batch_manager.simulate import ServiceLevel
from batch_manager.trace import replay
from engine_build.command_line import run


def main(
    trace: Annotated[Path, typer.Argument(help="What a TraceRecorder wrote; .gz is compressed.")],
    html: Annotated[Path | None, typer.Option(help="Write the run as a page.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write the run as a trace file for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the iteration table as CSV.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the iteration table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    slo_ttft: Annotated[
        float | None, typer.Option(callback=positive, help="Seconds to the first token, for the goodput.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(callback=positive, help="Seconds for each later token, on average.")
    ] = None,
    slo_e2e: Annotated[float | None, typer.Option(callback=positive, help="Seconds from arrival to end.")] = None,
    max_iterations: Annotated[int, typer.Option(min=1, help="Iterations in the page and the trace file.")] = 5000,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests in the page and the trace file.")] = 1000,
) -> None:
    """Replay TRACE. Ends with 1 where the BatchManager decides otherwise than recorded, with 2 for a bad trace."""
    pictures = RunPictures(
        ServiceLevel(slo_ttft, slo_tpot, slo_e2e), html, chrome, csv, table, max_iterations, max_requests
    )
    with bad_input(trace):
        result = replay(trace, pictures.observers)
    pictures.write(trace.name)
    pictures.print_report(as_json)
    if not result.is_complete and result.difference is None:
        console.print("the trace has no end: the recorded run was killed, or is still going on", style="yellow")
    if result.difference is not None:
        console.print(f"first difference: {result.difference}", style="red", markup=False)
        raise typer.Exit(1)
    console.print(f"{result.num_iterations} iterations of {result.num_requests} requests replayed: no difference")


if __name__ == "__main__":
    run(main, "scripts/replay")
