"""`executor triton-worker`: the Executor's process of a Triton server. Model instances start it; people need not."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from executor import Executor, GuidedDecodingConfig, RequestError
from executor.cli.opening import configure_logging
from executor.guided_decoding import can_guide
from executor.serving.garbage import settle_garbage_collector
from executor.text import TokenizerError
from executor.triton.backend.settings import ParameterError
from executor.triton.parameters import ModelSettings, model_settings
from executor.triton.priority import PriorityLevels
from executor.triton.requests import RowReader
from executor.triton.worker import BridgedExecutor, Worker


def triton_worker(
    socket_fd: Annotated[int, typer.Option("--socket-fd", help="A listening socket that is inherited.")],
) -> None:
    """Serve an engine to the instances of a Triton model: their settings are on standard input."""
    configure_logging("info")
    listener = socket.socket(fileno=socket_fd)
    settings = json.load(sys.stdin)
    worker = Worker(listener, settings["server_process"])
    try:
        model = model_settings(settings["parameters"])
        executor = _opened(model)
    except (ParameterError, RequestError, EngineDirectoryError, TokenizerError, ValueError, OSError) as error:
        worker.fail(" ".join(str(error).split()))
        raise typer.Exit(2) from None
    with executor:
        settle_garbage_collector()
        serve_model(worker, listener, executor, model, settings)


def serve_model(
    worker: Worker, listener: socket.socket, executor: BridgedExecutor, model: ModelSettings, settings: dict[str, Any]
) -> None:
    """Serve until the last instance has left; one that comes while the process is ending is served as well."""
    queue = settings["queue"]
    reader = RowReader(
        executor.spec.vocab_size,
        decoupled=settings["decoupled"],
        exclude_input_in_output=model.exclude_input_in_output,
        priorities=PriorityLevels(int(queue.get("priority_levels", 0)), int(queue.get("default_priority_level", 0))),
    )
    worker.serve(executor, reader, model.stats_period_seconds)
    Path(listener.getsockname()).unlink(missing_ok=True)
    worker.serve(executor, reader, model.stats_period_seconds)


def _opened(model: ModelSettings) -> Executor:
    if not model.guides and can_guide(EngineDirectory.open(model.engine_dir)):
        model.executor_config.guided_decoding_config = GuidedDecodingConfig()
    return Executor(model.engine_dir, model.executor_config)
