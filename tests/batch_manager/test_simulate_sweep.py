"""Layouts over load: capacities, the recommendation, the table, the page, the script."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from batch_manager import BatchManagerConfig, KvCacheConfig
from batch_manager.pictures import cluster_page, goodput_svg
from batch_manager.simulate import (
    Cluster,
    ClusterReport,
    InstanceSpec,
    Layout,
    LinearCost,
    OfferedRequest,
    Role,
    SimulationError,
    Sweep,
    layouts,
    sweep,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_cluster_load.py"


def any_report() -> ClusterReport:
    spec = InstanceSpec(
        Role.BOTH, BatchManagerConfig(), KvCacheConfig(num_blocks=64, tokens_per_block=4), LinearCost(1)
    )
    cluster = Cluster([spec], 1.0)
    cluster.run([OfferedRequest(0.0, [1] * 4, 2)])
    return ClusterReport.of(cluster)


REPORT = any_report()
TOGETHER, APART = Layout(0, 0, 2), Layout(1, 1, 0)


def served(shares: dict[Layout, dict[float, float]], attainment: float = 0.9) -> Sweep:
    """A sweep whose runs serve these shares of the requests well, by layout and load."""
    return sweep(
        lambda layout, load: replace(REPORT, served_well=shares[layout][load], goodput=shares[layout][load] * load),
        list(shares),
        next(iter(shares.values())),
        attainment,
    )


def test_the_capacity_lies_where_the_line_between_two_loads_crosses_what_is_asked_for() -> None:
    result = served({TOGETHER: {1.0: 1.0, 2.0: 0.95, 4.0: 0.85}, APART: {1.0: 1.0, 2.0: 0.8, 4.0: 0.1}})
    assert [capacity.layout for capacity in result.capacities] == [TOGETHER, APART]
    assert result.capacities[0].load == pytest.approx(3.0)
    assert result.capacities[1].load == pytest.approx(1.5)
    assert result.recommended == result.capacities[0]


def test_the_advice_compares_with_instances_that_do_everything() -> None:
    result = served({TOGETHER: {1.0: 1.0, 3.0: 0.8}, APART: {1.0: 1.0, 3.0: 0.85}}, 0.9)
    assert result.advice() == (
        "recommended: 1 context + 1 generation, up to 2.33 requests/s, 1.17 times what 2 aggregated serve"
    )


def test_a_load_that_all_serve_says_that_there_is_more() -> None:
    result = served({TOGETHER: {1.0: 1.0}, APART: {1.0: 1.0}})
    assert result.advice() == (
        "recommended: 2 aggregated, up to 1.00 requests/s and more: it serves every load measured"
    )


def test_loads_that_nobody_serves_give_no_recommendation() -> None:
    result = served({TOGETHER: {5.0: 0.5}, APART: {5.0: 0.6}})
    assert result.recommended is None
    assert result.advice() == "no layout serves 90% of the requests well at any of these loads"
    assert result.to_json()["recommended"] is None


def test_a_dip_below_what_is_asked_for_ends_the_capacity_even_if_a_higher_load_is_served() -> None:
    assert served({TOGETHER: {1.0: 1.0, 2.0: 0.8, 3.0: 1.0}}).capacities[0].load == pytest.approx(1.5)


def test_layouts_are_everything_together_and_every_way_to_part_it() -> None:
    assert layouts(3) == [Layout(0, 0, 3), Layout(1, 2, 0), Layout(2, 1, 0)]
    assert [layout.name for layout in layouts(2)] == ["2 aggregated", "1 context + 1 generation"]
    with pytest.raises(SimulationError, match="0 instances; there must be at least 1"):
        layouts(0)


def test_an_attainment_above_one_is_refused() -> None:
    with pytest.raises(SimulationError, match=r"attainment is 1\.5; it must be above 0 and at most 1"):
        served({TOGETHER: {1.0: 1.0}}, 1.5)


def test_the_table_and_the_page_show_every_layout_at_every_load() -> None:
    result = served({TOGETHER: {1.0: 1.0, 2.0: 0.5}, APART: {1.0: 1.0, 2.0: 0.75}})
    table, page = result.table(), cluster_page(result, "a <title>", "of this & that")
    assert "1.50 (75%)" in table
    assert "a &lt;title&gt;" in page
    assert "of this &amp; that" in page
    assert page.count("<circle") == 2 * 4
    assert "1 context + 1 generation at 2.00 requests/s: goodput 1.50, 75.0% served well" in page
    assert "src=" not in page
    assert "http" not in page


def test_the_picture_stands_alone() -> None:
    picture = goodput_svg(served({TOGETHER: {1.0: 1.0, 2.0: 0.5}, APART: {1.0: 1.0, 2.0: 0.75}}))
    svg = ElementTree.fromstring(picture)
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"2 aggregated", "1 context + 1 generation", "goodput, requests/s"} <= set(texts)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


# The script


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_sweep_is_printed_and_drawn(tmp_path: Path) -> None:
    page = tmp_path / "cluster.html"
    finished = run("--num-requests", 40, "--instances", 2, "--load", "2,200", "--json", "--html", page)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert len(result["runs"]) == 4
    assert all(entry["report"]["num_ended"] == {"LENGTH": 40} for entry in result["runs"])
    assert result["recommended"]["load"] >= 2
    assert page.read_text().startswith("<!doctype html>")


def test_the_columns_of_a_published_trace_are_read_and_a_death_is_survived(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02}.6805900,{100 + second},{20 + second}" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = ["--format", "azure", "--roles", "1,2,0", "--load", 20, "--die", "1.0:1"]
    finished = run(trace, *options)
    assert finished.returncode == 0, finished.stderr
    assert "40: 40 LENGTH; refused: none" in finished.stdout
    assert "generation (dead)" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--load", "many"], "--load is many; expected one or more numbers separated by commas"),
        (["--roles", "1,2", "--load", "1"], "--roles is 1,2; expected 3 numbers separated by commas"),
        (["--roles", "1,1,0"], "--roles is one layout at one --load, without --html and --svg"),
        (["--roles", "1,0,0", "--load", "1"], "no instance is there that goes on with requests"),
        (["--die", "1:0"], "--die goes with --roles"),
        (["--roles", "1,1,0", "--load", "1", "--die", "soon"], "--die is soon; expected TIME:INSTANCE"),
        (["--bandwidth", "0"], "bytes_per_second is 0.0; it must be above 0"),
        (["--load", "0"], "the speed-up is 0.0; it must be above 0"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(arguments: list[str], complaint: str) -> None:
    finished = run("--num-requests", 5, *arguments)
    assert finished.returncode == 2
    assert complaint in finished.stderr.splitlines()[-1]
