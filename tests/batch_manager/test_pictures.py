"""Pictures of a run show what happened: the table, the trace file, the page."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from batch_manager import BatchManagerConfig, CapacitySchedulerPolicy, KvCacheConfig
from batch_manager.pictures import (
    IterationTable,
    SpanKind,
    Timeline,
    chrome_trace,
    html_page,
    table_csv,
    table_text,
)
from batch_manager.simulate import (
    LinearCost,
    OfferedRequest,
    RunMetrics,
    RunSeries,
    Simulation,
    synthetic,
    take,
    uniform,
)
from batch_manager.simulate.series import MAX_POINTS
from batch_manager.trace import Observer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def watch(offered: Iterable[OfferedRequest], *observers: Observer, num_blocks: int = 64, **config: Any) -> None:
    """Steps take one second."""
    settings = BatchManagerConfig(**{"max_batch_size": 4, "max_num_tokens": 16, **config})
    kv_config = KvCacheConfig(num_blocks=num_blocks, tokens_per_block=4, enable_block_reuse=False)
    Simulation(settings, kv_config, LinearCost(1.0), observers).run(offered)


def two_requests() -> list[OfferedRequest]:
    return [OfferedRequest(0.0, [1] * 4, 4), OfferedRequest(0.5, [2] * 20, 2)]


# Table


def test_the_table_shows_both_phases_in_one_iteration() -> None:
    table = IterationTable()
    watch(two_requests(), table)
    assert table_text(table.rows).splitlines() == [
        " iteration     request       phase    computed   with_spec      reused   scheduled      blocks",
        "         0           0     context           0           4           0           4           1",
        "        1+           1     context           0          20           0          15           5",
        "                     0  generation           4           5           0           1           2",
        "        2+           1     context          15          20           0           5           5",
        "                     0  generation           5           6           0           1           2",
        "         3           0  generation           6           7           0           1           2",
        "                     1  generation          20          21           0           1           6",
    ]


def test_the_table_as_csv_has_the_same_rows() -> None:
    table = IterationTable()
    watch(two_requests(), table)
    rows = list(csv.DictReader(table_csv(table.rows).splitlines()))
    assert len(rows) == len(table.rows) == 7
    assert rows[1] == {
        "iteration": "1",
        "request": "1",
        "phase": "context",
        "num_computed_tokens": "0",
        "num_tokens_with_spec": "20",
        "reused_tokens": "0",
        "num_scheduled_tokens": "15",
        "blocks": "5",
    }


def test_a_table_that_is_full_says_so() -> None:
    table = IterationTable(max_rows=3)
    watch(two_requests(), table)
    assert len(table.rows) == 3
    assert not table.is_complete


# Timeline


def test_a_request_is_queued_then_computed_in_chunks_then_generates() -> None:
    timeline = Timeline()
    watch(two_requests(), timeline)
    spans = timeline.tracks[1].spans
    assert [(span.kind, span.begin, span.end) for span in spans] == [
        (SpanKind.QUEUED, 0.5, 1.0),
        (SpanKind.CONTEXT, 1.0, 2.0),
        (SpanKind.CONTEXT, 2.0, 3.0),
        (SpanKind.GENERATION, 3.0, 4.0),
    ]
    assert spans[2].detail == "positions 15 to 20 of 20"
    assert timeline.tracks[1].first_token == 3.0
    assert timeline.tracks[1].end == 4.0


def test_a_request_that_waits_says_what_for_and_who_holds_it() -> None:
    timeline = Timeline()
    watch([OfferedRequest(0.0, [1] * 4, 12), OfferedRequest(0.0, [2] * 4, 12)], timeline, num_blocks=5)
    first = timeline.tracks[1].spans[0]
    assert first.kind is SpanKind.QUEUED
    assert first.detail == "kv_reservation: needs 4, available 1, held by 0"
    assert (first.first_iteration, first.last_iteration) == (0, 11)


def test_a_paused_request_and_the_iteration_that_paused_it_are_shown() -> None:
    timeline = Timeline()
    watch(
        [OfferedRequest(0.0, [n] * 4, 20) for n in range(2)],
        timeline,
        num_blocks=8,
        capacity_scheduler_policy=MAX_UTILIZATION,
    )
    kinds = [span.kind for track in timeline.tracks for span in track.spans]
    assert SpanKind.PAUSED in kinds
    assert sum(record.num_paused for record in timeline.iterations) == sum(t.num_pauses for t in timeline.tracks) > 0


def test_spans_of_a_request_touch_each_other_from_arrival_to_end() -> None:
    timeline = Timeline()
    watch(
        take(synthetic(0.8, uniform(3, 40), uniform(1, 20)), 40),
        timeline,
        num_blocks=24,
        capacity_scheduler_policy=MAX_UTILIZATION,
    )
    for track in timeline.tracks:
        assert track.spans[0].begin == track.arrival
        assert track.spans[-1].end == track.end
        for before, after in zip(track.spans, track.spans[1:], strict=False):
            assert before.end == after.begin


def test_steps_planned_ahead_do_not_overlap_in_the_picture() -> None:
    timeline = Timeline()
    watch([OfferedRequest(0.0, [n] * 4, 12) for n in range(3)], timeline, max_steps_in_flight=2)
    for before, after in zip(timeline.iterations, timeline.iterations[1:], strict=False):
        assert before.end <= after.begin < after.end


def test_a_long_run_is_watched_to_a_limit_and_counted_beyond() -> None:
    timeline = Timeline(max_iterations=20, max_requests=5)
    watch(take(synthetic(1.0, uniform(3, 9), uniform(1, 9)), 50), timeline)
    assert (len(timeline.iterations), len(timeline.tracks)) == (20, 5)
    assert timeline.num_requests == 50
    assert timeline.num_iterations > 20
    assert "the first 20 iterations and the first 5 requests" in html_page(timeline, "run")


def test_the_series_of_a_long_run_keeps_its_sums_in_a_bounded_number_of_points() -> None:
    series, metrics = RunSeries(width=0.5), RunMetrics()
    watch(take(synthetic(0.1, uniform(3, 9), uniform(1, 9)), 300), series, metrics)
    assert len(series.points) <= MAX_POINTS
    assert series.width >= 4.0
    assert sum(point.num_output_tokens for point in series.points) == metrics.num_output_tokens
    assert sum(point.num_iterations for point in series.points) == metrics.num_iterations


# Trace file


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(timeline))["traceEvents"]
    return events


def test_the_trace_file_has_a_track_for_iterations_and_one_for_each_request() -> None:
    timeline = Timeline()
    watch(two_requests(), timeline)
    events = events_of(timeline)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["iterations", "request 0", "request 1"]
    iterations = [event for event in events if event.get("cat") == "iteration"]
    assert [(event["ts"], event["dur"]) for event in iterations] == [(i * 1e6, 1e6) for i in range(4)]


def test_the_trace_file_counts_rows_requests_and_blocks() -> None:
    timeline = Timeline()
    watch(two_requests(), timeline)
    counters = [(event["name"], event["args"]) for event in events_of(timeline) if event["ph"] == "C"]
    assert counters[3:6] == [
        ("batch (rows)", {"context": 15, "generation": 1}),
        ("requests", {"running": 2, "waiting": 0}),
        ("KV blocks", {"used": 7, "cached": 0}),
    ]


def test_every_event_of_the_trace_file_has_the_fields_of_its_phase() -> None:
    timeline = Timeline()
    watch(take(synthetic(1.0, uniform(3, 40), uniform(1, 20)), 20), timeline, num_blocks=20)
    required = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "M": {"name", "pid", "args"},
        "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    }
    for event in events_of(timeline):
        assert required[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


# Page


def full_page(title: str = "a run") -> str:
    timeline, metrics, series = Timeline(), RunMetrics(), RunSeries()
    watch(
        take(synthetic(0.8, uniform(3, 40), uniform(1, 20)), 40),
        timeline,
        metrics,
        series,
        num_blocks=24,
        capacity_scheduler_policy=MAX_UTILIZATION,
    )
    return html_page(timeline, title, metrics, series)


class References(HTMLParser):
    """Everything a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data", "srcset")]


def test_the_page_needs_nothing_but_itself() -> None:
    page = full_page()
    references = References()
    references.feed(page)
    assert references.found == []
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|https?://", page)


def test_what_is_in_the_data_cannot_leave_its_script_element() -> None:
    timeline = Timeline()
    offered = OfferedRequest(0.0, [1] * 4, 2, tenant="</script><b>@SCRIPT@")
    watch([offered], timeline)
    page = html_page(timeline, "<i>@DATA@")
    assert "</script><b>" not in page
    assert "<i>" not in page
    assert page.count("</script>") == 2
    data = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["tracks"][0]["tenant"] == offered.tenant


PROBE = """
<script>
const point = (canvas, x, y) => {
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
  return document.getElementById("tooltip").textContent.replaceAll("\\n", " | ");
};
const isLongWait = (span) => KINDS[span[0]] === "queued" && span[2] - span[1] > 3;
const track = data.tracks.findIndex((item) => item.spans.some(isLongWait));
const span = data.tracks[track].spans.find(isLongWait);
const scale = timeScale(view, tracks.clientWidth);
const found = [
  point(charts, 300, 20),
  point(tracks, scale.x((span[1] + span[2]) / 2), track * ROW_HEIGHT + ROW_HEIGHT / 2 + 2),
];
document.querySelector("[data-zoom='0.5']").click();
const half = (view.end - view.begin) / (whole.end - whole.begin);
const painted = (canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((v) => v);
const ids = ["charts", "tracks", "curves", "series-charts"];
document.body.dataset.probe = JSON.stringify({
  found, half, painted: ids.filter((id) => painted(document.getElementById(id))),
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_real_browser_draws_the_page_and_says_on_hover_why_a_request_waits(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "page.html"
    path.write_text(full_page().replace("</body>", PROBE + "</body>"), encoding="utf-8")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    finished = subprocess.run(
        [CHROMIUM, *arguments, "--window-size=1200,900", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 'data-ready="true"' in finished.stdout
    probe = re.search(r'data-probe="([^"]*)"', finished.stdout)
    assert probe is not None, finished.stderr
    result = json.loads(probe[1].replace("&quot;", '"').replace("&amp;", "&"))
    iteration, request = result["found"]
    assert re.match(r"iteration \d+, at .* took .* context: \d+ requests", iteration.replace("|", ""))
    assert re.search(
        r"queued for .* iterations \d+ to \d+ .*[a-z_]+: needs \d+, available \d+, held by \d+",
        request.replace("|", ""),
    )
    assert result["half"] == pytest.approx(0.5)
    assert result["painted"] == ["charts", "tracks", "curves", "series-charts"]
