"""Kernel timings that builds hand on to later ones, so that the same kernels are not timed again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from engine_build.targets.interface import TargetError


def read_timing_cache(config: Any, path: Path | None) -> None:
    """Give an `IBuilderConfig` the timings in `path`, or none yet.

    Raises:
        TargetError: the file cannot be read, or holds timings of another version or device.
    """
    try:
        content = b"" if path is None else path.read_bytes()
    except OSError as error:
        raise TargetError(f"cannot read --input_timing_cache {path}: {error.strerror}") from error
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise TargetError(
            f"--input_timing_cache {path} holds timings of another TensorRT version or device: leave it out, and write "
            "a new one with --output_timing_cache"
        )


def write_timing_cache(config: Any, path: Path) -> None:
    """Write the timings of a build, whole or not at all: several builds may share one file."""
    content = memoryview(config.get_timing_cache().serialize())
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
