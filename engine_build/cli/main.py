"""`engine-build`: the options, and which command they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine_build import __version__
from engine_build.builder import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS, BuildError
from engine_build.cli.build import BuildArguments, build_command
from engine_build.cli.console import one_line_errors, output
from engine_build.cli.inspect import inspect_command
from engine_build.command_line import OneLineCommand, OneLineGroup
from engine_build.network.options import WEIGHT_DTYPES
from engine_build.targets import TARGET_NAMES
from engine_build.targets.interface import DEFAULT_PROFILING_VERBOSITY, CompileOptions, TensorRtOptions
from engine_build.targets.tensorrt.base import PROFILING_VERBOSITIES


class _Commands(OneLineGroup):
    error_prefix = "engine-build: error"


_app = typer.Typer(
    name="engine-build",
    cls=_Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    _app()


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"engine-build {__version__}")
        raise typer.Exit


@_app.callback(invoke_without_command=True)
def _build(
    context: typer.Context,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option("--checkpoint_dir", help="Hugging Face or TensorRT-LLM checkpoint directory, or GGUF file."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="Engine directory to write; an engine there is replaced.")
    ] = None,
    target: Annotated[str, typer.Option("--target", help=f"One of: {', '.join(TARGET_NAMES)}.")] = TARGET_NAMES[0],
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max_batch_size", help=f"Sequences in one step. Default: {DEFAULT_MAX_BATCH_SIZE}, or max_num_tokens."
        ),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option("--max_num_tokens", help=f"Tokens in one step. Default: {DEFAULT_MAX_NUM_TOKENS}."),
    ] = None,
    max_input_len: Annotated[
        int | None, typer.Option("--max_input_len", help="Tokens of a prompt. Default: max_seq_len - 1.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max_seq_len", help="Tokens of prompt and answer. Default: the model's positions."),
    ] = None,
    tokens_per_block: Annotated[
        int | None, typer.Option("--tokens_per_block", help="Positions in a KV block. Default: 32.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="What to compute in. Default: float32 on reference, bfloat16 elsewhere."),
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option("--weight_dtype", help=f"One of: {', '.join(WEIGHT_DTYPES)}.")
    ] = WEIGHT_DTYPES[0],
    tp_size: Annotated[int, typer.Option("--tp_size", help="Devices that share every matrix.")] = 1,
    pp_size: Annotated[int, typer.Option("--pp_size", help="Groups of devices that share the layers.")] = 1,
    workers: Annotated[int, typer.Option("--workers", help="Ranks that are built at the same time.", min=1)] = 1,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            "--compute_capability",
            help="tensorrt-rtx: device generation to build for, such as 8.9; may be given several times. "
            "Default: 8.9 and 12.0. tensorrt builds for the GPU that is there.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv_cache_dtype", help="tensorrt: float8_e4m3fn or int8 for keys and values of 8 bits. Default: dtype."
        ),
    ] = None,
    strip_plan: Annotated[
        bool, typer.Option("--strip_plan", help="tensorrt, tensorrt-rtx: leave weights out, for refitting.")
    ] = False,
    weight_streaming: Annotated[
        bool, typer.Option("--weight_streaming", help="tensorrt, tensorrt-rtx: let weights stay in host memory.")
    ] = False,
    profiling_verbosity: Annotated[
        str | None,
        typer.Option(
            "--profiling_verbosity", help=f"tensorrt, tensorrt-rtx, one of: {', '.join(PROFILING_VERBOSITIES)}."
        ),
    ] = None,
    input_timing_cache: Annotated[
        Path | None, typer.Option("--input_timing_cache", help="tensorrt: kernel timings of earlier builds.")
    ] = None,
    output_timing_cache: Annotated[
        Path | None, typer.Option("--output_timing_cache", help="tensorrt: where to write this build's timings.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Print what engine and build will take; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    version: Annotated[  # noqa: ARG001, handled by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build an engine directory from a checkpoint."""
    if context.invoked_subcommand is not None:
        with one_line_errors():
            _refuse_build_options(context)
        return
    limits = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_input_len": max_input_len,
        "max_seq_len": max_seq_len,
        "tokens_per_block": tokens_per_block,
    }
    with one_line_errors():
        if checkpoint_dir is None:
            raise BuildError("--checkpoint_dir is needed: a Hugging Face model directory or a GGUF file")
        if output_dir is None and not dry_run:
            raise BuildError("--output_dir is needed (or --dry_run, which writes nothing)")
        arguments = BuildArguments(
            checkpoint_dir,
            output_dir,
            target,
            limits,
            dtype,
            weight_dtype,
            tp_size,
            pp_size,
            _tensorrt_options(compute_capability, kv_cache_dtype, strip_plan, weight_streaming, profiling_verbosity),
            CompileOptions(input_timing_cache, output_timing_cache),
            workers,
        )
        build_command(arguments, dry_run, as_json)


def _tensorrt_options(
    compute_capability: list[str] | None,
    kv_cache_dtype: str | None,
    strip_plan: bool,
    weight_streaming: bool,
    profiling_verbosity: str | None,
) -> TensorRtOptions | None:
    """`None` when none was given, so that another target is not given what it would refuse."""
    options = TensorRtOptions(
        tuple(compute_capability or ()),
        kv_cache_dtype,
        strip_plan,
        weight_streaming,
        profiling_verbosity or DEFAULT_PROFILING_VERBOSITY,
    )
    return options if options != TensorRtOptions() or profiling_verbosity is not None else None


def _refuse_build_options(context: typer.Context) -> None:
    """Another command has no use for them, and would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "json" if name == "as_json" else name
            raise BuildError(f"--{option} is for builds, it does not go with {context.invoked_subcommand}")


@_app.command("inspect", cls=OneLineCommand)
def _inspect(
    engine_dir: Annotated[Path, typer.Argument(help="An engine directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file's checksum.")] = False,
) -> None:
    """Print what is in an engine directory."""
    with one_line_errors():
        inspect_command(engine_dir, as_json, verify)
