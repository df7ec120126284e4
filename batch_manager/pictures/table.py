"""The iteration table as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import groupby

from batch_manager.iteration_table import IterationRow, iteration_rows
from batch_manager.plan import IterationPlan
from batch_manager.trace.observed import Observer

_HEADINGS = {
    "iteration": "iteration",
    "request": "request",
    "phase": "phase",
    "num_computed_tokens": "computed",
    "num_tokens_with_spec": "with_spec",
    "reused_tokens": "reused",
    "num_scheduled_tokens": "scheduled",
    "blocks": "blocks",
}


class IterationTable(Observer):
    """Gathers the iteration table of a run, its first `max_rows` rows."""

    def __init__(self, max_rows: int = 100_000) -> None:
        self.rows: list[IterationRow] = []
        self.is_complete = True
        """Whether no row has been left out."""
        self._max_rows = max_rows

    def on_schedule(self, plan: IterationPlan, now: float) -> None:  # noqa: ARG002
        if len(self.rows) + len(plan.scheduled) > self._max_rows:
            self.is_complete = False
        if self.is_complete:
            self.rows += iteration_rows(plan)


def table_csv(rows: Iterable[IterationRow]) -> str:
    """One line a row, the fields' names first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(IterationRow._fields)
    writer.writerows(rows)
    return text.getvalue()


def table_text(rows: Iterable[IterationRow]) -> str:
    """Columns for people: the iteration's number stands once, and `+` marks iterations in which both phases meet."""
    lines = ["  ".join(f"{heading:>10}" for heading in _HEADINGS.values())]
    for iteration, group in groupby(rows, key=lambda row: row.iteration):
        in_iteration = list(group)
        is_mixed = len({row.phase for row in in_iteration}) > 1
        label = f"{iteration}{'+' if is_mixed else ''}"
        for row in in_iteration:
            lines.append("  ".join([f"{label:>10}", *(f"{value!s:>10}" for value in row[1:])]))
            label = ""
    return "\n".join(lines) + "\n"
