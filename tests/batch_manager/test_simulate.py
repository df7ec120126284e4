"""The BatchManager in virtual time: what is counted is what happened, and a recorded run is predicted."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager import BatchManagerConfig, CapacitySchedulerPolicy, KvCacheConfig, KvCacheManager, Phase, Request
from batch_manager.simulate import (
    CostFitError,
    DeviceFigures,
    Histogram,
    LinearCost,
    ModelFigures,
    OfferedRequest,
    RooflineCost,
    RunMetrics,
    RunReport,
    ScatteredCost,
    ServiceLevel,
    SimulatedSpeculation,
    Simulation,
    SimulationError,
    SimulationStalledError,
    StepShape,
    faster,
    fit_cost,
    fixed,
    log_normal,
    recorded,
    step_shape,
    synthetic,
    take,
    uniform,
    with_max_new_tokens,
)
from batch_manager.simulate.fit import MeasuredStep, fit_steps
from batch_manager.simulate.histogram import RELATIVE_ERROR
from batch_manager.trace import InstantClock, ManualClock, TraceRecorder, replay
from batch_manager.trace.records import Row

CONFIG = BatchManagerConfig(max_batch_size=8, max_num_tokens=64)
KV_CONFIG = KvCacheConfig(num_blocks=256, tokens_per_block=4)


def run(
    offered: Iterable[OfferedRequest],
    cost: LinearCost | RooflineCost,
    config: BatchManagerConfig = CONFIG,
    kv_config: KvCacheConfig = KV_CONFIG,
    service_level: ServiceLevel | None = None,
    speculation: SimulatedSpeculation | None = None,
) -> RunReport:
    metrics = RunMetrics(service_level)
    Simulation(config, kv_config, cost, [metrics], speculation).run(offered)
    return RunReport.of(metrics)


# Histogram


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=300),
    st.sampled_from([0.0, 1.0, 50.0, 90.0, 99.0, 100.0]),
)
def test_percentiles_are_within_the_promised_relative_error(values: list[float], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = float(np.percentile(values, percent, method="inverted_cdf"))
    assert histogram.percentile(percent) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001, abs=1e-6)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert histogram.maximum == max(values)


def test_the_curve_of_a_histogram_rises_to_one() -> None:
    histogram = Histogram()
    for value in (0.0, 0.1, 0.1, 3.0):
        histogram.add(value)
    shares = [share for _, share in histogram.curve()]
    assert shares == [0.25, 0.75, 1.0]


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="at least 0 seconds"):
        Histogram().add(value)


# Cost


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=5))
def test_the_shape_of_a_step_counts_rows_and_what_they_attend_to(entries: list[tuple[int, int, int]]) -> None:
    rows = [
        Row(
            number,
            start,
            size,
            min(start, replayed),
            0,
            start + size,
            0,
            True,
            Phase.CONTEXT if number % 2 else Phase.GENERATION,
        )
        for number, (start, size, replayed) in enumerate(entries)
    ]
    positions = [range(row.start - row.num_replayed_tokens, row.start + row.num_scheduled_tokens) for row in rows]
    assert step_shape(rows) == StepShape(
        sum(len(p) for row, p in zip(rows, positions, strict=True) if row.phase is Phase.CONTEXT),
        sum(len(p) for row, p in zip(rows, positions, strict=True) if row.phase is Phase.GENERATION),
        sum(position + 1 for p in positions for position in p),
        sum(p.stop for p in positions),
    )


def test_a_roofline_step_is_bound_by_memory_when_small_and_by_compute_when_large() -> None:
    model = ModelFigures(8e9, 32, 32, 8, 128)
    cost = RooflineCost(model, DeviceFigures(1e15, 4.8e12))
    assert cost.seconds(StepShape(0, 1, 1, 1)) == pytest.approx(16e9 / 4.8e12, rel=1e-3)
    assert cost.seconds(StepShape(8192, 0, 0, 0)) == pytest.approx(2 * 8e9 * 8192 / 1e15, rel=1e-3)
    assert model.kv_bytes_per_token == 131_072


def test_a_roofline_without_bandwidth_is_refused_by_name() -> None:
    with pytest.raises(SimulationError, match="bytes_per_second is 0"):
        RooflineCost(ModelFigures(1, 1, 1, 1, 1), DeviceFigures(1.0, 0.0))


def random_shape(source: random.Random) -> StepShape:
    return StepShape(*(source.randint(0, limit) for limit in (500, 64, 100_000, 30_000)))


@given(st.integers(0, 1000), st.lists(st.sampled_from([0.0, 1e-5, 3e-4]), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_fit_finds_the_coefficients_that_made_the_times(seed: int, coefficients: list[float]) -> None:
    source = random.Random(seed)
    truth = LinearCost(0.01, *coefficients)
    steps = [MeasuredStep(shape, truth.seconds(shape), 0.002) for shape in (random_shape(source) for _ in range(100))]
    fit = fit_steps(steps)
    assert fit.cost.overhead == 0.002
    assert fit.mean_error < 1e-6
    assert fit.cost.per_context_token == pytest.approx(coefficients[0], abs=1e-8)
    assert fit.cost.per_kv_token == pytest.approx(coefficients[3], abs=1e-8)


def test_the_fit_never_makes_a_step_cheaper_for_doing_more() -> None:
    source = random.Random(1)
    shapes = [random_shape(source) for _ in range(200)]
    steps = [MeasuredStep(s, 0.01 + 1e-4 * s.num_context_tokens - 1e-7 * s.num_kv_tokens, None) for s in shapes]
    cost = fit_steps(steps).cost
    assert cost.per_kv_token == 0.0
    assert cost.per_context_token == pytest.approx(1e-4, rel=0.05)


def test_scattered_steps_take_as_long_as_the_measured_ones_on_average_and_vary_like_them() -> None:
    source = random.Random(4)
    shapes = [random_shape(source) for _ in range(400)]
    truth = LinearCost(0.01, 1e-4, 1e-4)
    steps = [MeasuredStep(shape, truth.seconds(shape) * source.choice((0.8, 1.2)), None) for shape in shapes]
    cost = fit_steps(steps).scattered()
    simulated = [cost.seconds(shape) for _ in range(10) for shape in shapes]
    smooth = [truth.seconds(shape) for _ in range(10) for shape in shapes]
    assert sum(simulated) == pytest.approx(sum(smooth), rel=0.03)
    ratios = sorted(a / b for a, b in zip(simulated, smooth, strict=True))
    assert ratios[len(ratios) // 4] == pytest.approx(0.8, abs=0.05)
    assert ratios[3 * len(ratios) // 4] == pytest.approx(1.2, abs=0.05)


def test_steps_without_measured_factors_do_not_scatter() -> None:
    cost = ScatteredCost(LinearCost(1.0), context_factors=[], generation_factors=[2.0])
    assert cost.seconds(StepShape(1, 0, 1, 1)) == 1.0
    assert cost.seconds(StepShape(0, 1, 1, 1)) == 2.0


def test_too_few_steps_are_refused_with_their_number() -> None:
    with pytest.raises(CostFitError, match="has 3 steps; at least 20"):
        fit_steps([MeasuredStep(StepShape(1, 0, 1, 1), 0.1, None)] * 3)


# Simulation


def test_one_request_takes_its_context_step_and_its_generation_steps() -> None:
    cost = LinearCost(constant=1.0, per_context_token=0.1, per_generation_row=0.5, overhead=0.25)
    report = run([OfferedRequest(2.0, [5] * 10, 4)], cost)
    assert report.time_to_first_token.max == pytest.approx(0.25 + 1.0 + 1.0)
    assert report.inter_token.max == pytest.approx(0.25 + 1.5)
    assert report.end_to_end.max == pytest.approx(2.25 + 3 * 1.75)
    assert report.duration == pytest.approx(report.end_to_end.max)
    assert report.num_iterations == 4
    assert report.num_ended == {"LENGTH": 1}
    assert report.output_tokens_per_second == pytest.approx(4 / 7.5)


def test_overlap_hides_what_is_spent_outside_the_engine() -> None:
    cost = LinearCost(constant=1.0, overhead=0.5)
    offered = [OfferedRequest(0.0, [number] * 4, 50) for number in range(4)]
    serial = run(offered, cost)
    overlapped = run(offered, cost, BatchManagerConfig(max_batch_size=8, max_num_tokens=64, max_steps_in_flight=2))
    assert serial.duration == pytest.approx(50 * 1.5)
    assert overlapped.duration == pytest.approx(0.5 + 50)


def test_a_request_that_asks_for_more_than_it_needs_ends_by_itself() -> None:
    offered = list(with_max_new_tokens([OfferedRequest(0.0, [1, 2, 3], 5)], 100))
    report = run(offered, LinearCost(1.0))
    assert report.num_ended == {"END_ID": 1}
    assert report.num_iterations == 5


def test_deadlines_and_cancellations_happen_when_they_are_due() -> None:
    offered = [
        OfferedRequest(0.0, [1] * 4, 100, allotted_time=5.5),
        OfferedRequest(0.0, [2] * 4, 100, cancel_after=3.5),
        OfferedRequest(0.0, [3] * 4, 10),
    ]
    report = run(offered, LinearCost(1.0))
    assert report.num_ended == {"LENGTH": 1, "TIMED_OUT": 1, "CANCELLED": 1}
    assert report.duration == pytest.approx(10.0)


def test_goodput_counts_the_requests_within_the_service_level() -> None:
    offered = [OfferedRequest(0.0, [number] * 4, 10) for number in range(12)]
    report = run(offered, LinearCost(1.0), service_level=ServiceLevel(time_to_first_token=5.0))
    assert report.served_well == pytest.approx(8 / 12)  # a batch of 8, then the rest
    assert report.goodput == pytest.approx(8 / report.duration)


def test_shared_prefixes_are_found_in_the_cache() -> None:
    offered = [OfferedRequest(10.0 * number, [9] * 16 + [number] * 4, 2) for number in range(5)]
    report = run(offered, LinearCost(1.0))
    assert report.cache_hits == pytest.approx(4 * 16 / (5 * 20))


def test_a_tight_pool_pauses_under_max_utilization_and_counts_what_is_recomputed() -> None:
    config = BatchManagerConfig(
        max_batch_size=8, max_num_tokens=64, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
    )
    kv_config = KvCacheConfig(num_blocks=16, tokens_per_block=4, enable_block_reuse=False)
    report = run([OfferedRequest(0.0, [n] * 8, 30) for n in range(4)], LinearCost(1.0), config, kv_config)
    assert report.num_pauses > 0
    assert report.recomputed_tokens > 0
    assert report.num_ended == {"LENGTH": 4}


def test_accepted_drafts_make_the_run_shorter() -> None:
    offered = [OfferedRequest(0.0, [1] * 4, 61)]
    plain = run(offered, LinearCost(1.0))
    speculating = run(offered, LinearCost(1.0), speculation=SimulatedSpeculation(2, 1.0))
    assert plain.num_iterations == 61
    assert speculating.num_iterations < 25
    assert speculating.output_tokens_per_second == pytest.approx(61 / speculating.duration)


def test_an_acceptance_rate_above_one_is_refused() -> None:
    with pytest.raises(SimulationError, match=r"acceptance_rate \(1.5\) within 0 and 1"):
        SimulatedSpeculation(2, 1.5)


def test_a_request_that_can_never_fit_is_counted_as_refused() -> None:
    report = run([OfferedRequest(0.0, [1] * 4000, 5), OfferedRequest(0.0, [1], 5)], LinearCost(1.0))
    assert report.num_refused == {"exceeds_kv_cache": 1}
    assert report.num_requests == 1


def test_arrivals_out_of_order_are_refused_with_both_times() -> None:
    with pytest.raises(SimulationError, match=r"arrives at 1\.0 s, before the one offered before it"):
        run([OfferedRequest(0.0, [1], 5), OfferedRequest(2.0, [1], 5), OfferedRequest(1.0, [1], 5)], LinearCost(1.0))


def test_a_simulation_that_cannot_go_on_says_what_its_requests_wait_for() -> None:
    simulation = Simulation(CONFIG, KV_CONFIG, LinearCost(1.0))
    simulation.manager.pause()
    with pytest.raises(SimulationStalledError, match="request 0 waits for paused_by_operator"):
        simulation.run([OfferedRequest(0.0, [1], 5)])


def test_the_same_workload_gives_the_same_report() -> None:
    reports = [
        run(take(synthetic(2.0, log_normal(30, 0.8, 200), uniform(1, 20), seed=3), 50), LinearCost(0.1))
        for _ in range(2)
    ]
    assert reports[0] == reports[1]


def test_evenly_spaced_arrivals_keep_their_distance() -> None:
    times = [r.arrival_time for r in take(faster(synthetic(2.0, fixed(4), fixed(1), is_poisson=False), 4.0), 3)]
    assert times == [0.125, 0.25, 0.375]


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak(num_requests: int) -> int:
        tracemalloc.start()
        run(take(synthetic(20.0, fixed(20), fixed(4)), num_requests), LinearCost(0.05))
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(100)
    assert peak(1200) < 1.5 * peak(300)


def test_an_overload_holds_requests_back_instead_of_filling_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [OfferedRequest(0.01 * number, [number % 50] * 8, 4) for number in range(300)]
    unbounded = run(offered, LinearCost(1.0))
    monkeypatch.setattr("batch_manager.simulate.simulator.MAX_BACKLOG", 20)
    metrics = RunMetrics()
    simulation = Simulation(CONFIG, KV_CONFIG, LinearCost(1.0), [metrics])
    simulation.run(offered)
    bounded = RunReport.of(metrics)
    assert simulation.num_held_back > 200
    assert metrics.max_waiting <= 28
    assert bounded.time_to_first_token == unbounded.time_to_first_token
    assert bounded.duration == unbounded.duration


def test_a_report_can_be_read_by_people_and_programs() -> None:
    report = run([OfferedRequest(0.0, [1] * 4, 3)], LinearCost(1.0))
    assert "time to first token, ms       1000.0" in report.table()
    assert "1: 1 LENGTH; refused: none" in report.table()
    assert report.to_json()["num_iterations"] == 3


# Against a recorded run


NUM_RECORDED = 500


class NoisyEngine:
    """Stands for a real engine: steps take time by a law of its own, with noise and now and then a hiccup."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)

    def seconds(self, num_rows: int, num_kv_tokens: int) -> float:
        padded = -(-num_rows // 16) * 16
        hiccup = 0.05 if self.source.random() < 0.002 else 0.0
        return (0.008 + 1.5e-4 * padded + 4e-7 * num_kv_tokens) * self.source.gauss(1.0, 0.05) + hiccup


def record_run_of_noisy_engine(path: Path, config: BatchManagerConfig, rate: float, seed: int) -> None:
    """A serving loop in simulated time, written independently of the simulator."""
    manual = ManualClock()
    clock = InstantClock(manual)
    kv = KvCacheManager(KvCacheConfig(num_blocks=600, tokens_per_block=16), clock)
    engine, source = NoisyEngine(seed), random.Random(seed)
    arrivals = []
    now = 0.0
    for _ in range(NUM_RECORDED):
        now += source.expovariate(rate)
        arrivals.append(now)
    arrivals.reverse()
    requests = 0
    with TraceRecorder(config, kv, clock, path) as manager:
        while arrivals or manager.has_work:
            if not manager.has_work and arrivals:
                manual.now = max(manual.now, arrivals[-1])
            while arrivals and arrivals[-1] <= manual.now:
                prompt = [source.randrange(1000) for _ in range(max(1, round(source.lognormvariate(4.5, 0.7))))]
                prefix = [7] * 64 if source.random() < 0.5 else []
                length = source.randint(10, 80)
                manager.add_request(
                    Request(requests, prefix + prompt, length, arrival_time=arrivals.pop(), end_id=5000)
                )
                requests += 1
            plan = manager.schedule()
            num_kv_tokens = sum(entry.start + entry.num_scheduled_tokens for entry in plan.scheduled)
            manual.now += engine.seconds(plan.num_tokens, num_kv_tokens)
            sampled = [[5000 if source.random() < 0.01 else 1] if entry.samples else [] for entry in plan.scheduled]
            manager.update(plan, sampled)
            manual.now += 0.0004 * source.gauss(1.0, 0.1)


@pytest.mark.parametrize("rate", [12.0, 25.0])
@pytest.mark.parametrize(
    "policy", [CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, CapacitySchedulerPolicy.MAX_UTILIZATION]
)
def test_the_simulation_of_a_recorded_run_is_within_5_percent_of_it(
    tmp_path: Path, rate: float, policy: CapacitySchedulerPolicy
) -> None:
    path = tmp_path / "run.jsonl"
    config = BatchManagerConfig(max_batch_size=32, max_num_tokens=256, capacity_scheduler_policy=policy)
    record_run_of_noisy_engine(path, config, rate, seed=int(rate))
    measured = RunMetrics()
    assert replay(path, [measured]).difference is None
    actual = RunReport.of(measured)

    predicted_metrics = RunMetrics()
    Simulation(
        config, KvCacheConfig(num_blocks=600, tokens_per_block=16), fit_cost(path).cost, [predicted_metrics]
    ).run(recorded(path))
    predicted = RunReport.of(predicted_metrics)

    assert sum(predicted.num_ended.values()) == sum(actual.num_ended.values()) == NUM_RECORDED
    for name in ("duration", "requests_per_second", "output_tokens_per_second", "mean_batch", "cache_hits"):
        assert getattr(predicted, name) == pytest.approx(getattr(actual, name), rel=0.05), name
    for name in ("time_to_first_token", "inter_token", "time_per_output_token", "end_to_end"):
        before, after = getattr(actual, name), getattr(predicted, name)
        assert after.mean == pytest.approx(before.mean, rel=0.05), name
        assert after.p50 == pytest.approx(before.p50, rel=0.05), name
