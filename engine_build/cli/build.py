"""`engine-build --checkpoint_dir ...`, and its `--dry_run`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint import Checkpoint, open_checkpoint
from engine_build.cli.console import build_settings, format_bytes, messages, output, progress_bar
from engine_build.engine_dir import EngineDirectoryError
from engine_build.engine_writer import will_replace
from engine_build.manifest import BuildConfig
from engine_build.memory import MemoryEstimate, estimate_memory
from engine_build.targets.interface import CompileOptions, Target, TensorRtOptions
from engine_build.targets.select import select_target


class BuildArguments(NamedTuple):
    """The command line, as given."""

    checkpoint_dir: Path
    output_dir: Path | None
    """`None` with `--dry_run` only."""
    target: str
    limits: dict[str, int | None]
    dtype: str | None
    weight_dtype: str
    tp_size: int
    pp_size: int
    tensorrt: TensorRtOptions | None
    """`None` when no option of TensorRT was given."""
    compile_options: CompileOptions
    workers: int


def build_command(arguments: BuildArguments, dry_run: bool, as_json: bool) -> None:
    """Run it. Raises what `one_line_errors` turns into an exit status."""
    target = select_target(arguments.target)
    checkpoint = open_checkpoint(arguments.checkpoint_dir)
    build_config = resolve_build_config(
        checkpoint.config,
        target,
        **arguments.limits,
        dtype=arguments.dtype,
        weight_dtype=arguments.weight_dtype,
        tp_size=arguments.tp_size,
        pp_size=arguments.pp_size,
        tensorrt=arguments.tensorrt,
    )
    memory = estimate_memory(checkpoint, build_config, target)
    if dry_run:
        _print_estimate(checkpoint, build_config, target, memory, as_json)
    elif arguments.output_dir is not None:
        _build(checkpoint, build_config, target, memory, arguments, arguments.output_dir, as_json)


def _build(
    checkpoint: Checkpoint,
    build_config: BuildConfig,
    target: Target,
    memory: MemoryEstimate,
    arguments: BuildArguments,
    output_dir: Path,
    as_json: bool,
) -> None:
    if will_replace(output_dir):
        messages.print(f"replacing the engine in {output_dir}")
    _check_disk_space(output_dir, memory.weights)
    settings = {"checkpoint": checkpoint.source, "target": target.name, **build_settings(build_config)}
    for name, value in settings.items():
        messages.print(f"{name:<22}{value}")
    started = time.monotonic()
    with progress_bar() as progress:
        engine = build_engine(
            checkpoint,
            build_config,
            target,
            output_dir,
            progress,
            options=arguments.compile_options,
            workers=arguments.workers,
        )
    if engine.tokenizer_dir is None:
        messages.print("the checkpoint has no tokenizer: this engine takes token ids only")
    if as_json:
        output.print_json(engine.manifest.to_json())
    else:
        size = sum(record.num_bytes for record in engine.manifest.files.values())
        output.print(f"wrote {output_dir}: {format_bytes(size)} in {time.monotonic() - started:.1f} s")


def _check_disk_space(output_dir: Path, needed: int) -> None:
    existing = next(parent for parent in output_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise EngineDirectoryError(
            f"{output_dir} needs {format_bytes(needed)}, {existing} has {format_bytes(free)} left"
        )


def _print_estimate(
    checkpoint: Checkpoint, build_config: BuildConfig, target: Target, memory: MemoryEstimate, as_json: bool
) -> None:
    cost = target.build_cost(memory.weights, build_config, checkpoint.config)
    if as_json:
        report = {
            "checkpoint": checkpoint.source,
            "target": target.name,
            "build_config": dataclasses.asdict(build_config),
            "memory": dataclasses.asdict(memory),
            "build_cost": None if cost is None else cost._asdict(),
        }
        output.print_json(json.dumps(report))
        return
    settings = Table("setting", "value", title=f"{checkpoint.source} for {target.name}", title_justify="left")
    for name, value in build_settings(build_config).items():
        settings.add_row(name, str(value))
    output.print(settings)
    table = Table("memory", "bytes", "", title_justify="left")
    table.add_row("weights", str(memory.weights), format_bytes(memory.weights))
    table.add_row("workspace (estimate)", str(memory.workspace), format_bytes(memory.workspace))
    for kv in memory.kv_cache:
        amounts = {
            "a token": kv.bytes_per_token,
            f"a block of {build_config.tokens_per_block}": kv.bytes_per_block,
            f"a sequence of {build_config.max_seq_len}": kv.bytes_for_one_sequence,
        }
        for what, amount in amounts.items():
            table.add_row(f"KV as {kv.dtype}, {what}", str(amount), format_bytes(amount))
    output.print(table)
    if cost is not None:
        output.print(
            f"building a rank (estimate): {format_bytes(cost.memory)} of memory, {cost.seconds:.0f} s on two cores"
        )
