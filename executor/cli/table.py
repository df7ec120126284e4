"""The iteration table: who ran in each iteration, and how far it came.

```
iteration  request  phase       num_computed_tokens  num_tokens_with_spec  ...
      * 3        1  generation                   12                    13
                 2  context                       0                    40
   4 to 9   same 2  generation                                      1 each
```
Iterations that only give the same requests one more token each are drawn as one line; the CSV file has every row.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table

from batch_manager.iteration_table import IterationRow
from batch_manager.plan import Phase

_COLUMNS = IterationRow._fields
_CONTEXT_STYLE = "bold cyan"


class AlikeIterations(NamedTuple):
    """Iterations that gave the same requests one token each."""

    first: int
    last: int
    num_requests: int


def group_iterations(rows: Sequence[IterationRow]) -> Iterator[list[IterationRow] | AlikeIterations]:
    """Rows by iteration; runs of iterations alike their predecessor are summed up."""
    previous: list[IterationRow] = []
    alike: list[list[IterationRow]] = []
    for _, group in itertools.groupby(rows, key=lambda row: row.iteration):
        current = list(group)
        if _is_alike(previous, current):
            alike.append(current)
        else:
            yield from _summed_up(alike)
            alike = []
            yield current
        previous = current
    yield from _summed_up(alike)


def iteration_table(rows: Sequence[IterationRow]) -> Table:
    """The rows as a table for `rich`; iterations that mix phases are marked."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption=_caption(rows), caption_justify="left")
    for name in _COLUMNS:
        table.add_column(_heading(name), justify="left" if name == "phase" else "right", no_wrap=True)
    for group in group_iterations(rows):
        if isinstance(group, AlikeIterations):
            values = {
                "iteration": f"{group.first} to {group.last}" if group.last > group.first else str(group.first),
                "request": f"same {group.num_requests}",
                "phase": Phase.GENERATION.value,
                "num_scheduled_tokens": "1 each",
            }
            table.add_row(*(values.get(name, "") for name in _COLUMNS), style="dim")
            continue
        mixed = _is_mixed(group)
        for index, row in enumerate(group):
            iteration = f"{'* ' if mixed else ''}{row.iteration}" if index == 0 else ""
            style = _CONTEXT_STYLE if row.phase == Phase.CONTEXT else None
            table.add_row(iteration, *(str(value) for value in row[1:]), style=style)
    return table


def write_csv(rows: Sequence[IterationRow], path: Path) -> None:
    """Every row, under a header."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(rows)


def requests_per_iteration(rows: Sequence[IterationRow]) -> float:
    """Mean number of requests in an iteration; 0 without rows."""
    num_iterations = len({row.iteration for row in rows})
    return len(rows) / num_iterations if num_iterations else 0.0


def _heading(name: str) -> str:
    """The column's name in lines short enough for 80 columns in all."""
    return name.replace("num_", "num_\n").replace("tokens_", "tokens_\n").replace("_tokens", "_\ntokens")


def _caption(rows: Sequence[IterationRow]) -> str:
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.iteration)]
    num_mixed = sum(map(_is_mixed, groups))
    return f"{len(groups)} iterations; {num_mixed} with context and generation requests together (*)"


def _is_mixed(group: Sequence[IterationRow]) -> bool:
    return len({row.phase for row in group}) > 1


def _is_alike(previous: Sequence[IterationRow], current: Sequence[IterationRow]) -> bool:
    return [row.request for row in previous] == [row.request for row in current] and all(
        row.phase == Phase.GENERATION and row.num_scheduled_tokens == 1 for row in itertools.chain(previous, current)
    )


def _summed_up(alike: list[list[IterationRow]]) -> Iterator[list[IterationRow] | AlikeIterations]:
    if alike:
        yield AlikeIterations(alike[0][0].iteration, alike[-1][0].iteration, len(alike[0]))
