r"""Goodput of layouts of a cluster over load, as one HTML page that needs nothing else.

```
 goodput │      ,-- 2 context + 2 generation        attainment │‾‾‾\__
         │   ,-'`-.                                            │......\.... what is asked for
         │ ,'      `--- 4 aggregated                           │       \__
         └───────────── load                                   └────────── load
```
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from importlib.resources import files

from batch_manager.simulate.sweep import Layout, Measured, Sweep

_WIDTH, _HEIGHT = 620, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 30, 44
_COLORS = ("#2f6fb7", "#d0602b", "#3a9d6a", "#8a56c2", "#d9a420", "#c2497f", "#4aa3b8", "#7d8794")
"""One a layout, in turn."""

_STYLE = """
.charts { display: flex; flex-wrap: wrap; gap: 24px; }
.charts svg { flex: 1 1 480px; max-width: 720px; font: 11px system-ui, sans-serif; }
.charts text { fill: var(--faint); }
.charts .title { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--line); }
.asked { stroke: var(--faint); stroke-dasharray: 4 4; }
.advice { font-size: 15px; }
.best td { font-weight: 600; }
"""


_PICTURE_STYLE = """
text { fill: #6b7280; font: 11px system-ui, sans-serif; }
.title { font-size: 13px; }
.grid { stroke: #6b7280; stroke-opacity: 0.3; }
"""
"""Of a picture that stands alone, on light and on dark ground."""


def cluster_page(sweep: Sweep, title: str, facts: str = "") -> str:
    """The page's text.

    Args:
        sweep: at least one run.
        title: for people.
        facts: what was simulated, in a line.
    """
    colors = _colors(sweep)
    css = (files("batch_manager.pictures") / "page.css").read_text(encoding="utf-8") + _STYLE
    legend = "".join(
        f'<li><i style="background:{color}"></i>{html.escape(layout.name)}</li>' for layout, color in colors.items()
    )
    goodput = _goodput_chart(sweep)
    attainment = _chart(
        sweep, colors, "served within the service level", lambda run: run.report.served_well, 1.0, sweep.attainment
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        f'<header><h1>{html.escape(title)}</h1>\n<p id="facts">{html.escape(facts)}</p></header>\n'
        f'<p class="advice">{html.escape(sweep.advice())}</p>\n<ul class="legend">{legend}</ul>\n'
        f'<div class="charts">\n{goodput}{attainment}</div>\n{_table(sweep)}</body>\n</html>\n'
    )


def goodput_svg(sweep: Sweep) -> str:
    """Goodput over load as a picture of its own, such as for a document."""
    names = "".join(
        f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 14 + 16 * index}" text-anchor="end" style="fill:{color}">'
        f"{html.escape(layout.name)}</text>\n"
        for index, (layout, color) in enumerate(_colors(sweep).items())
    )
    chart = _goodput_chart(sweep).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return chart.replace(">", f">\n<style>{_PICTURE_STYLE}</style>", 1).replace("</svg>", f"{names}</svg>")


def _colors(sweep: Sweep) -> dict[Layout, str]:
    return {layout: _COLORS[index % len(_COLORS)] for index, layout in enumerate(sweep.layouts)}


def _goodput_chart(sweep: Sweep) -> str:
    highest = max(run.report.goodput for run in sweep.runs)
    return _chart(sweep, _colors(sweep), "goodput, requests/s", lambda run: run.report.goodput, highest)


def _chart(
    sweep: Sweep,
    colors: dict[Layout, str],
    title: str,
    value: Callable[[Measured], float],
    top: float,
    asked: float | None = None,
) -> str:
    highest = max(run.load for run in sweep.runs)
    top = top or 1.0

    def x(load: float) -> float:
        return _LEFT + load / highest * (_WIDTH - _LEFT - _RIGHT)

    def y(of: float) -> float:
        return _HEIGHT - _BOTTOM - of / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title} over load">']
    parts.append(f'<text class="title" x="{_LEFT}" y="16">{title}</text>')
    for tick in _ticks(top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(highest):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">load, requests/s offered</text>')
    if asked is not None:
        line = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(asked):.1f}" y2="{y(asked):.1f}"'
        parts.append(f'<line class="asked" {line}><title>asked for: {asked:.0%}</title></line>')
    for layout, color in colors.items():
        parts += _line(sweep.of(layout), color, x, y, value)
    return "\n".join([*parts, "</svg>\n"])


def _line(
    runs: Sequence[Measured],
    color: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
    value: Callable[[Measured], float],
) -> list[str]:
    points = " ".join(f"{x(run.load):.1f},{y(value(run)):.1f}" for run in runs)
    return [
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(
            f'<circle cx="{x(run.load):.1f}" cy="{y(value(run)):.1f}" r="3.5" fill="{color}">'
            f"<title>{html.escape(_facts(run))}</title></circle>"
            for run in runs
        ),
    ]


def _facts(run: Measured) -> str:
    report = run.report
    first, later = report.time_to_first_token, report.time_per_output_token
    return (
        f"{run.layout.name} at {run.load:.2f} requests/s: goodput {report.goodput:.2f}, {report.served_well:.1%} "
        f"served well; to the first token p50 {first.p50 * 1e3:.0f} ms, p99 {first.p99 * 1e3:.0f} ms; "
        f"per token p50 {later.p50 * 1e3:.1f} ms, p99 {later.p99 * 1e3:.1f} ms"
    )


def _ticks(top: float) -> list[float]:
    """About five round numbers from 0 to `top`."""
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [index * step for index in range(int(top / step * (1 + 1e-9)) + 1)]


def _table(sweep: Sweep) -> str:
    best = ' class="best"'
    rows = "".join(
        f"<tr{best if capacity == sweep.recommended else ''}><td>{html.escape(capacity.layout.name)}</td>"
        f"<td>{'over ' if capacity.is_beyond else ''}{capacity.load:.2f}</td></tr>\n"
        for capacity in sweep.capacities
    )
    return (
        f"<h2>Highest load with {sweep.attainment:.0%} served well</h2>\n<table><thead><tr><th>layout</th>"
        f"<th>requests/s</th></tr></thead><tbody>\n{rows}</tbody></table>\n"
    )
