"""Opens engine directories for the commands, and turns what can go wrong into one line and exit code 2."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from engine_build.command_line import os_error_line
from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from executor import Executor, ExecutorConfig, RequestError
from executor.client.errors import CallError
from executor.serving.credentials import CredentialsError
from executor.serving.errors import BindError
from executor.serving.request_log import JsonFormatter, LineFormatter
from executor.text import Tokenizer, TokenizerError

_EXIT_CODE = 2
_LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can put right ends the command with one line and exit code 2 instead of a traceback."""
    try:
        yield
    except RequestError as error:
        _fail(error.message)
    except (EngineDirectoryError, CredentialsError, BindError, CallError, TokenizerError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(os_error_line(error))


@contextmanager
def opened_executor(engine_dir: Path, config: ExecutorConfig) -> Iterator[Executor]:
    """Load an engine directory, telling a terminal that it takes a moment, and shut the executor down at the end."""
    console = Console(stderr=True)
    with one_line_errors():
        EngineDirectory.open(engine_dir)
        try:
            with console.status(f"loading {engine_dir} ..."):
                executor = Executor(engine_dir, config)
        except ValueError as error:  # a plan or an option that the engine's library does not take
            _fail(str(error))
        with executor:
            yield executor


def opened_tokenizer(executor: Executor) -> Tokenizer | None:
    """The engine directory's tokenizer; `None` for an engine of token ids only."""
    directory = executor.manifest.tokenizer_dir
    if directory is None:
        return None
    try:
        return Tokenizer(directory)
    except ValueError as error:
        _fail(str(error))


def end_ids(executor: Executor, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that end an output: those the model's configuration names, then the tokenizer's."""
    from_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*executor.manifest.model_config.eos_token_ids, *from_tokenizer)))


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Log lines to standard error, so that standard output carries results only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(_LOG_LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(_EXIT_CODE)
