"""Shows several answers as they are written.

On a terminal each answer has its own place, redrawn as text comes. Elsewhere text comes as lines, each with the
answer's number, so that a log shows how they interleave.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

_LINE_WIDTH = 96


class AnswerView(Protocol):
    """Where answers are shown; use it in a `with` block."""

    def add(self, index: int, text: str, /) -> None:
        """New text of an answer."""
        ...

    def finish(self, index: int, note: str, /) -> None:
        """An answer has ended; the note says why and how."""
        ...

    def __enter__(self) -> AnswerView: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def answer_view(console: Console, labels: list[str]) -> AnswerView:
    """The view that suits the console: live on a terminal, lines elsewhere.

    Args:
        console: where to show.
        labels: what each answer is called, by index: its prompt.
    """
    if len(labels) == 1:
        return OneAnswer(console)
    return LiveAnswers(console, labels) if console.is_terminal else AnswerLines(console)


class OneAnswer:
    """A single answer: its text as it comes, and nothing else."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def add(self, _index: int, text: str) -> None:
        self._console.out(text, end="", highlight=False)
        self._console.file.flush()

    def finish(self, _index: int, _note: str) -> None:
        self._console.out("")

    def __enter__(self) -> OneAnswer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class AnswerLines:
    """Lines of text, each begun with its answer's number."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open: dict[int, str] = {}

    def add(self, index: int, text: str) -> None:
        *lines, rest = (self._open.get(index, "") + text).split("\n")
        while len(rest) > _LINE_WIDTH and " " in rest[:_LINE_WIDTH]:
            cut = rest.rindex(" ", 0, _LINE_WIDTH)
            lines.append(rest[:cut])
            rest = rest[cut + 1 :]
        self._open[index] = rest
        for line in lines:
            self._print(index, line)

    def finish(self, index: int, note: str) -> None:
        rest = self._open.pop(index, "")
        if rest:
            self._print(index, rest)
        self._print(index, f"-- {note}")

    def _print(self, index: int, line: str) -> None:
        self._console.out(f"[{index}] {line}", highlight=False)

    def __enter__(self) -> AnswerLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for index in list(self._open):
            self.finish(index, "not finished")


class LiveAnswers:
    """All answers on the screen at once: the end of each while they are written, whole when all have ended."""

    def __init__(self, console: Console, labels: list[str]) -> None:
        self._console = console
        self._labels = labels
        self._texts = [""] * len(labels)
        self._notes = [""] * len(labels)
        self._live = Live(console=console, refresh_per_second=12, transient=True, get_renderable=self._draw)

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text

    def finish(self, index: int, note: str) -> None:
        self._notes[index] = note

    def __enter__(self) -> LiveAnswers:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, traceback)
        for index in range(len(self._labels)):
            self._console.print(self._answer(index, self._texts[index].strip()))

    def _draw(self) -> RenderableType:
        lines_each = max(1, (self._console.height - 1) // len(self._labels) - 1)
        return Group(*(self._answer(index, self._tail(index, lines_each)) for index in range(len(self._labels))))

    def _answer(self, index: int, text: str) -> Text:
        label = self._labels[index].replace("\n", " ")
        note = f"  ({self._notes[index]})" if self._notes[index] else ""
        width = max(20, self._console.width - len(note) - 6)
        shown = label if len(label) <= width else label[: width - 1] + "…"
        return Text.assemble((f"[{index}] {shown}", "bold green"), (note, "dim"), "\n", text)

    def _tail(self, index: int, num_lines: int) -> str:
        """The last lines of an answer, as the console will wrap them."""
        lines = Text(self._texts[index].strip()).wrap(self._console, self._console.width)
        return "\n".join(line.plain for line in lines[-num_lines:])
