"""Options that replay and simulation share: what of a run is written down, and how it is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from batch_manager.pictures import IterationTable, Timeline, chrome_trace, html_page, table_csv, table_text
from batch_manager.simulate import RunMetrics, RunReport, RunSeries, ServiceLevel
from batch_manager.trace import Observer

console = Console(stderr=True, soft_wrap=True)


@dataclass
class RunPictures:
    """Watches a run and writes what was asked for."""

    service_level: ServiceLevel
    html: Path | None
    chrome: Path | None
    csv: Path | None
    table: bool
    max_iterations: int
    max_requests: int
    metrics: RunMetrics = field(init=False)
    timeline: Timeline = field(init=False)
    series: RunSeries = field(init=False)
    rows: IterationTable = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RunMetrics(self.service_level)
        self.timeline = Timeline(self.max_iterations, self.max_requests)
        self.series = RunSeries()
        self.rows = IterationTable()

    @property
    def observers(self) -> list[Observer]:
        observers: list[Observer] = [self.metrics]
        if self.html or self.chrome:
            observers.append(self.timeline)
        if self.html:
            observers.append(self.series)
        if self.csv or self.table:
            observers.append(self.rows)
        return observers

    def write(self, title: str) -> None:
        """Write the files and print the iteration table, as asked for."""
        if self.html:
            self._write(self.html, html_page(self.timeline, title, self.metrics, self.series))
        if self.chrome:
            self._write(self.chrome, chrome_trace(self.timeline))
        if self.csv:
            self._write(self.csv, table_csv(self.rows.rows))
        if self.table:
            print(table_text(self.rows.rows))
        if (self.csv or self.table) and not self.rows.is_complete:
            console.print(f"the iteration table ends after {len(self.rows.rows)} rows")

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        console.print(f"wrote {path}")

    def print_report(self, as_json: bool) -> None:
        report = RunReport.of(self.metrics)
        print(json.dumps(report.to_json()) if as_json else report.table())
