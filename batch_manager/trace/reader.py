"""Reads a trace, line by line."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

from batch_manager.trace.errors import TraceFormatError
from batch_manager.trace.lines import LineCodec, header_from_line
from batch_manager.trace.records import End, Header, Record


def open_trace(path: Path, mode: Literal["r", "w"]) -> TextIO:
    """Text of a trace; `.gz` is compressed. `mode` is `r` or `w`."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, mode + "b", compresslevel=6), encoding="utf-8")
    return path.open(mode, encoding="utf-8")


class TraceReader:
    """The records of a trace, read lazily; use as a context manager.

    Raises:
        TraceFormatError, TraceVersionError: from the start for the header, from the iteration for what follows.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_trace(Path(path), "r")
        try:
            self.header: Header = header_from_line(self._file.readline())
        except BaseException:
            self._file.close()
            raise
        self.line = 1
        """Of the record read last."""
        self.is_complete = False
        """Whether the end of the trace has been read. A run that was killed leaves a trace without one."""

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """All records but the end. A last line that was cut off in the middle is not a record."""
        codec = LineCodec()
        while (text := self._read_line()).endswith("\n"):
            self.line += 1
            record = codec.decode(text, self.line)
            if isinstance(record, End):
                if record.num_lines != self.line - 1:
                    raise TraceFormatError(
                        self.line, f"{record.num_lines} lines were written before this one, {self.line - 1} are here"
                    )
                self.is_complete = True
                return
            yield record

    def _read_line(self) -> str:
        try:
            return self._file.readline()
        except EOFError:  # the compressed stream was cut off
            return ""
