"""What can be wrong with a trace."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace cannot be read or written."""


class TraceFormatError(TraceError):
    """A line is not what the format asks for: names the line, the field, and what would be right."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.line = line
        """1 is the header; 0: not known."""


class TraceVersionError(TraceError):
    """The trace is of a format version that this code does not read."""


class TraceWriteError(TraceError):
    """Writing failed on the way: the run went on, but the trace ends early."""
