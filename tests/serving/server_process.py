"""`executor serve` as a process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXECUTOR = [sys.executable, "-c", "from executor.cli import main; main()"]


@contextmanager
def serving(engine_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, and where it listens."""
    process = subprocess.Popen(
        [*EXECUTOR, "serve", str(engine_dir), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"listening on (127\.0\.0\.1:\d+)\n", line)
        if match is None:
            process.kill()  # a server that goes on keeps its stderr open, so reading that would never end
            rest, errors = process.communicate()
            raise AssertionError(f"the server should say where it listens, but it said: {line}{rest}{errors}")
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()
