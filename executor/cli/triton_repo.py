"""`executor triton-repo`: a model repository for Triton Inference Server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from engine_build.engine_dir import EngineDirectory
from executor.cli import options
from executor.cli.opening import one_line_errors
from executor.triton.backend.settings import ParameterError
from executor.triton.config_pbtxt import ConfigSyntaxError
from executor.triton.convert import Conversion, convert
from executor.triton.parameters import PARAMETERS, model_settings
from executor.triton.repository import RepositoryOptions, install_backend, write_repository

_DEFAULT_MAX_BATCH_SIZE = 64
_Value = TypeVar("_Value")


def triton_repo(
    engine_dir: options.EngineDir,
    output: Annotated[Path, typer.Option("--output", help="The repository: a folder, made if need be.")],
    old_config: Annotated[
        Path | None,
        typer.Option("--from", help="config.pbtxt of TensorRT-LLM's tensorrt_llm: take over what it says."),
    ] = None,
    decoupled: Annotated[
        bool | None,
        typer.Option("--decoupled/--no-decoupled", help="Whether requests may stream; they may by default."),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max_batch_size", help="Rows that one Triton request may have.", min=1)
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="NAME=VALUE", help="A parameter of tensorrt_llm; may be repeated."),
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Compute contexts and generate on an instance each: context, generation, disaggregated_serving_bls.",
        ),
    ] = False,
    backend_directory: Annotated[
        Path | None,
        typer.Option(
            "--backend_directory",
            help="Install the backend `inflight` here and let tensorrt_llm use it; else it is a python model.",
        ),
    ] = None,
) -> None:
    """Write the models tensorrt_llm, preprocessing, postprocessing, ensemble and tensorrt_llm_bls."""
    with one_line_errors():
        tokenizer_dir = EngineDirectory.open(engine_dir).tokenizer_dir
        try:
            conversion = Conversion() if old_config is None else convert(old_config.read_text(encoding="utf-8"))
            parameters = {**conversion.parameters, **_parameters(parameter or [])}
            model_settings({**parameters, "gpt_model_path": str(engine_dir)})
        except ConfigSyntaxError as error:
            _fail(f"{old_config}: {error}")
        except ParameterError as error:
            _fail(str(error))
        written = RepositoryOptions(
            engine_dir=engine_dir.resolve(),
            tokenizer_dir=None if tokenizer_dir is None else tokenizer_dir.resolve(),
            executor_command=Path(sys.executable).with_name("executor"),
            decoupled=_first(decoupled, conversion.decoupled, True),
            max_batch_size=_first(max_batch_size, conversion.max_batch_size, _DEFAULT_MAX_BATCH_SIZE),
            dynamic_batching=conversion.dynamic_batching,
            instance_count=_first(None, conversion.instance_count, 1),
            parameters=parameters,
            is_custom_backend=backend_directory is not None,
            is_disaggregated=disaggregated,
        )
        write_repository(output, written)
        if backend_directory is not None:
            install_backend(backend_directory)
    for line in conversion.carried:
        typer.echo(f"carried over: {line}")
    for line in conversion.left:
        typer.echo(f"not carried over: {line}")
    if tokenizer_dir is None:
        typer.echo("the engine directory has no tokenizer: wrote no text models")
    typer.echo(f"wrote {output}")


def _parameters(texts: list[str]) -> dict[str, str]:
    """`NAME=VALUE` each; raises `ParameterError`."""
    parameters = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark or name not in PARAMETERS:
            raise ParameterError(f"--parameter {text}: give NAME=VALUE; names are {', '.join(sorted(PARAMETERS))}")
        parameters[name] = value
    return parameters


def _first(given: _Value | None, carried: _Value | None, default: _Value) -> _Value:
    return given if given is not None else carried if carried is not None else default


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
