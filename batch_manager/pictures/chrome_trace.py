"""A run as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Processes: iterations (one track and the counters), requests (one track each). Times are microseconds from the first
event. Format: "Trace Event Format", Google, JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from batch_manager.pictures.timeline import IterationRecord, RequestTrack, Timeline

ITERATIONS_PROCESS = 1
REQUESTS_PROCESS = 2

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> str:
    """JSON text."""
    begin = min(
        [record.begin for record in timeline.iterations[:1]] + [track.arrival for track in timeline.tracks],
        default=0.0,
    )
    events = [*_metadata(timeline), *_iterations(timeline, begin), *_requests(timeline, begin)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _metadata(timeline: Timeline) -> Iterator[Event]:
    for process, name in ((ITERATIONS_PROCESS, "iterations"), (REQUESTS_PROCESS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield {"ph": "M", "name": "thread_name", "pid": ITERATIONS_PROCESS, "tid": 0, "args": {"name": "iterations"}}
    for index, track in enumerate(timeline.tracks):
        thread = {"pid": REQUESTS_PROCESS, "tid": index}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"request {track.request_id}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": index}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _iterations(timeline: Timeline, begin: float) -> Iterator[Event]:
    for record in timeline.iterations:
        yield {
            "ph": "X",
            "name": f"iteration {record.iteration}",
            "cat": "iteration",
            "pid": ITERATIONS_PROCESS,
            "tid": 0,
            "ts": _microseconds(record.begin - begin),
            "dur": _microseconds(record.end - record.begin),
            "args": {name: value for name, value in record._asdict().items() if name not in ("begin", "end")},
        }
        for name, values in _counters(timeline, record).items():
            yield {
                "ph": "C",
                "name": name,
                "pid": ITERATIONS_PROCESS,
                "ts": _microseconds(record.begin - begin),
                "args": values,
            }


def _counters(timeline: Timeline, record: IterationRecord) -> dict[str, dict[str, int]]:
    counters = {
        "batch (rows)": {"context": record.num_context_rows, "generation": record.num_generation_rows},
        "requests": {"running": record.num_running, "waiting": record.num_waiting},
    }
    if timeline.num_blocks:
        counters["KV blocks"] = {"used": record.num_used_blocks, "cached": record.num_cached_blocks}
    return counters


def _requests(timeline: Timeline, begin: float) -> Iterator[Event]:
    for index, track in enumerate(timeline.tracks):
        thread = {"pid": REQUESTS_PROCESS, "tid": index}
        for span in track.spans:
            yield {
                "ph": "X",
                "name": span.kind.value,
                "cat": "request",
                **thread,
                "ts": _microseconds(span.begin - begin),
                "dur": _microseconds(span.end - span.begin),
                "args": {
                    "request": track.request_id,
                    "detail": span.detail,
                    "iterations": f"{span.first_iteration} to {span.last_iteration}",
                },
            }
        yield from _instants(track, thread, begin)


def _instants(track: RequestTrack, thread: dict[str, int], begin: float) -> Iterator[Event]:
    if track.first_token is not None:
        yield _instant("first token", track.first_token - begin, thread, {})
    if track.end is not None:
        facts = {
            "prompt tokens": track.num_prompt_tokens,
            "output tokens": track.num_output_tokens,
            "reused tokens": track.num_reused_tokens,
            "recomputed tokens": track.num_recomputed_tokens,
            "pauses": track.num_pauses,
        }
        yield _instant(track.finish_reason.name, track.end - begin, thread, facts)


def _instant(name: str, seconds: float, thread: dict[str, int], arguments: dict[str, int]) -> Event:
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "cat": "request",
        **thread,
        "ts": _microseconds(seconds),
        "args": arguments,
    }
