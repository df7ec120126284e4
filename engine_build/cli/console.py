"""Two consoles, how numbers are shown, and how a failed command ends."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine_build.builder import BuildError
from engine_build.checkpoint import CheckpointError
from engine_build.command_line import os_error_line
from engine_build.engine_dir import EngineDirectoryError
from engine_build.manifest import BuildConfig
from engine_build.network import NetworkError
from engine_build.parallel import ParallelError
from engine_build.targets.interface import ProgressCallback, TargetError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130

output = Console(highlight=False, markup=False, soft_wrap=True)
messages = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

_BAD_INPUT_ERRORS = (BuildError, CheckpointError, EngineDirectoryError, NetworkError, ParallelError, TargetError)
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """`1536` -> `1.5 KiB`."""
    size, unit = float(num_bytes), _BYTE_UNITS[0]
    for larger in _BYTE_UNITS[1:]:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == _BYTE_UNITS[0] else f"{size:.1f} {unit}"


def build_settings(build_config: BuildConfig) -> dict[str, object]:
    """Name -> value as people read it: what only some targets have is listed only where it is there."""
    settings: dict[str, object] = dataclasses.asdict(build_config)
    tensorrt = settings.pop("tensorrt")
    if isinstance(tensorrt, dict):
        settings |= tensorrt | {"compute_capabilities": ", ".join(tensorrt["compute_capabilities"])}
    return settings


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line on stderr for whatever is not a defect of this program.

    SIGTERM is treated as Ctrl-C is, so that a build that is asked to stop removes what it has written.
    """
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    except _BAD_INPUT_ERRORS as error:
        _fail(str(error), BAD_INPUT)
    except OSError as error:
        _fail(os_error_line(error), FAILED)
    except KeyboardInterrupt:
        _fail("interrupted, nothing was written", INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    one_line = " ".join(message.split())
    print(f"engine-build: error: {one_line}", file=sys.stderr)
    raise SystemExit(code)


def _raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A bar for each stage, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages) as progress:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield report
