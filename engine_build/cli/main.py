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
from engine_build.network.options import WEIGHT_DTYPES
from engine_build.targets import TARGET_NAMES

_app = typer.Typer(
    name="engine-build",
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
        typer.Option("--checkpoint_dir", help="Hugging Face model directory (config.json, safetensors) or GGUF file."),
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
        typer.Option("--dtype", help="What to compute in. Default: bfloat16 on openvino, float32 on reference."),
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option("--weight_dtype", help=f"One of: {', '.join(WEIGHT_DTYPES)}.")
    ] = WEIGHT_DTYPES[0],
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Print what the engine will take in memory; write nothing.")
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
        build_command(BuildArguments(checkpoint_dir, output_dir, target, limits, dtype, weight_dtype), dry_run, as_json)


def _refuse_build_options(context: typer.Context) -> None:
    """Another command has no use for them, and would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "json" if name == "as_json" else name
            raise BuildError(f"--{option} is for builds, it does not go with {context.invoked_subcommand}")


@_app.command("inspect")
def _inspect(
    engine_dir: Annotated[Path, typer.Argument(help="An engine directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file's checksum.")] = False,
) -> None:
    """Print what is in an engine directory."""
    with one_line_errors():
        inspect_command(engine_dir, as_json, verify)
