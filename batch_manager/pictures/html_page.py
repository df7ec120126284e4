"""A run as one HTML page that needs nothing else: no network, no other file.

`page.html`, `page.css` and `page.js` beside this file are put together with the data.
"""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

from batch_manager.pictures.timeline import RequestTrack, SpanKind, Timeline
from batch_manager.simulate.histogram import Histogram
from batch_manager.simulate.metrics import RunMetrics
from batch_manager.simulate.report import Latency
from batch_manager.simulate.series import Point, RunSeries

_KINDS = list(SpanKind)
_MAX_CURVE_POINTS = 200


def html_page(
    timeline: Timeline, title: str, metrics: RunMetrics | None = None, series: RunSeries | None = None
) -> str:
    """The page's text.

    Args:
        timeline: iterations and requests.
        title: for people.
        metrics: adds percentiles and distributions.
        series: adds charts of the whole run, for one that is longer than its timeline.
    """
    template = files("batch_manager.pictures")
    data = json.dumps(_data(timeline, metrics, series), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (template / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (template / "page.js").read_text(encoding="utf-8"),
        "DATA": data,
    }
    page = (template / "page.html").read_text(encoding="utf-8")
    return re.sub("@(TITLE|STYLE|SCRIPT|DATA)@", lambda mark: parts[mark[1]], page)


def _data(timeline: Timeline, metrics: RunMetrics | None, series: RunSeries | None) -> dict[str, Any]:
    begin = min(
        [record.begin for record in timeline.iterations[:1]] + [track.arrival for track in timeline.tracks],
        default=0.0,
    )
    tracks = [_track(track, begin) for track in timeline.tracks]
    end = max(
        [record.end - begin for record in timeline.iterations[-1:]]
        + [track["spans"][-1][2] for track in tracks if track["spans"]],
        default=0.0,
    )
    return {
        "facts": _facts(timeline),
        "end": end,
        "num_blocks": timeline.num_blocks,
        "max_num_tokens": timeline.max_num_tokens,
        "iterations": _iterations(timeline, begin),
        "tracks": tracks,
        "latency": [] if metrics is None else _latency(metrics),
        "series": None if series is None else {"width": series.width, "points": list(map(_point, series.points))},
    }


def _facts(timeline: Timeline) -> str:
    facts = f"{timeline.num_iterations} iterations, {timeline.num_requests} requests"
    if timeline.num_refused:
        facts += f", {timeline.num_refused} refused"
    shown = []
    if len(timeline.iterations) < timeline.num_iterations:
        shown.append(f"the first {len(timeline.iterations)} iterations")
    if len(timeline.tracks) < timeline.num_requests:
        shown.append(f"the first {len(timeline.tracks)} requests")
    return facts + (f"; shown below: {' and '.join(shown)}" if shown else "")


def _seconds(value: float) -> float:
    return round(value, 7)


def _iterations(timeline: Timeline, begin: float) -> list[dict[str, Any]]:
    untils = [record.begin for record in timeline.iterations[1:]] + [record.end for record in timeline.iterations[-1:]]
    return [
        {
            "iteration": record.iteration,
            "begin": _seconds(record.begin - begin),
            "end": _seconds(record.end - begin),
            # Short gaps belong to the iteration before; a long one means that there was nothing to do.
            "until": _seconds((until if until - record.end < record.end - record.begin else record.end) - begin),
            "context_requests": record.num_context_requests,
            "generation_requests": record.num_generation_requests,
            "context_rows": record.num_context_rows,
            "generation_rows": record.num_generation_rows,
            "running": record.num_running,
            "waiting": record.num_waiting,
            "used": record.num_used_blocks,
            "cached": record.num_cached_blocks,
            "paused": record.num_paused,
        }
        for record, until in zip(timeline.iterations, untils, strict=True)
    ]


def _track(track: RequestTrack, begin: float) -> dict[str, Any]:
    return {
        "id": track.request_id,
        "tenant": track.tenant,
        "arrival": _seconds(track.arrival - begin),
        "first": None if track.first_token is None else _seconds(track.first_token - begin),
        "end": None if track.end is None else _seconds(track.end - begin),
        "reason": track.finish_reason.name,
        "prompt": track.num_prompt_tokens,
        "output": track.num_output_tokens,
        "reused": track.num_reused_tokens,
        "recomputed": track.num_recomputed_tokens,
        "pauses": track.num_pauses,
        "spans": [
            [
                _KINDS.index(span.kind),
                _seconds(span.begin - begin),
                _seconds(span.end - begin),
                span.first_iteration,
                span.last_iteration,
                span.detail,
            ]
            for span in track.spans
        ],
    }


def _latency(metrics: RunMetrics) -> list[dict[str, Any]]:
    return [
        {"name": name, "values": Latency.of(histogram).to_json(), "curve": _curve(histogram)}
        for name, histogram in (
            ("time to first token", metrics.time_to_first_token),
            ("inter-token", metrics.inter_token),
            ("end to end", metrics.end_to_end),
            ("in the queue", metrics.queue),
        )
    ]


def _curve(histogram: Histogram) -> list[tuple[float, float]]:
    points = histogram.curve()
    every = -(-len(points) // _MAX_CURVE_POINTS) or 1
    return points[::every] + points[-1:]


def _point(point: Point) -> dict[str, int]:
    return {
        "context_rows": point.num_context_rows,
        "generation_rows": point.num_generation_rows,
        "output_tokens": point.num_output_tokens,
        "pauses": point.num_pauses,
        "running": point.num_running,
        "waiting": point.num_waiting,
        "used": point.num_used_blocks,
    }
