"""Writing an engine directory so that it is either whole or not there.

```
parent/
├── .NAME.building-x3k9/     locked by the process that builds; removed when it ends
│   ├── engine/              everything is written here
│   └── replaced/            the engine that had the name before, for the moment between two renames
└── NAME/                    appears by one rename, when every byte has reached the disk
```

A build that is killed cannot remove its temporary directory; the next build of the same NAME does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_build.engine_dir import EngineDirectoryError, is_engine_directory


class EngineWriter:
    """One build in progress, made by `engine_writer`."""

    def __init__(self, workplace: Path, output_dir: Path) -> None:
        self._workplace = workplace
        self._output_dir = output_dir
        self.directory = workplace / "engine"
        """Where to write the engine's files."""
        self.directory.mkdir()

    def publish(self) -> None:
        """Make sure every byte is on disk, then give the directory its name. An engine of that name is replaced.

        Raises:
            EngineDirectoryError: the output directory cannot be written, or is something else by now.
        """
        for path in (*self.directory.rglob("*"), self.directory):
            _sync(path)
        replaced = self._workplace / "replaced"
        try:
            if will_replace(self._output_dir):
                self._output_dir.rename(replaced)
            self.directory.rename(self._output_dir)
        except OSError as error:
            if replaced.exists():
                replaced.rename(self._output_dir)
            raise EngineDirectoryError(f"cannot write {self._output_dir}: {error.strerror}") from error
        _sync(self._output_dir.parent)


@contextmanager
def engine_writer(output_dir: Path) -> Iterator[EngineWriter]:
    """Prepare to write `output_dir`. Whatever has not been published is removed at the end.

    Raises:
        EngineDirectoryError: `output_dir` may not be replaced, or its parent not be written to.
    """
    will_replace(output_dir)
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        workplace, lock = _make_workplace(output_dir)
    except OSError as error:
        raise EngineDirectoryError(f"cannot write to {output_dir.parent}: {error.strerror}") from error
    try:
        yield EngineWriter(workplace, output_dir)
    finally:
        shutil.rmtree(workplace)
        os.close(lock)


def will_replace(output_dir: Path) -> bool:
    """Whether an engine directory is there already.

    Raises:
        EngineDirectoryError: something is there that is neither an engine nor an empty directory.
    """
    if output_dir.is_symlink() or (output_dir.exists() and not output_dir.is_dir()):
        raise EngineDirectoryError(f"output directory {output_dir} exists and is no directory")
    if not output_dir.exists():
        return False
    if is_engine_directory(output_dir):
        return True
    if any(output_dir.iterdir()):
        raise EngineDirectoryError(
            f"output directory {output_dir} holds something that is not an engine: give another, or empty it"
        )
    return False


def _make_workplace(output_dir: Path) -> tuple[Path, int]:
    """Make and lock a temporary directory, and remove those that no process has locked any more.

    The parent is locked meanwhile, lest another build takes the new one, not locked yet, for abandoned.
    """
    prefix = f".{output_dir.name}.building-"
    with _locked(output_dir.parent, fcntl.LOCK_EX):
        for candidate in output_dir.parent.glob(f"{prefix}*"):
            _remove_if_abandoned(candidate)
        workplace = Path(tempfile.mkdtemp(prefix=prefix, dir=output_dir.parent))
        lock = os.open(workplace, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return workplace, lock


def _remove_if_abandoned(workplace: Path) -> None:
    try:
        with _locked(workplace, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(workplace)
    except BlockingIOError:
        return  # its build is running


@contextmanager
def _locked(directory: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
