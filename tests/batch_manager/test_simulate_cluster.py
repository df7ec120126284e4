"""Clusters in virtual time: routing, transfers, deaths, and what always holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager import BatchManagerConfig, CapacitySchedulerPolicy, KvCacheConfig
from batch_manager.simulate import (
    Cluster,
    ClusterMetrics,
    ClusterReport,
    Death,
    InstanceSpec,
    LinearCost,
    NetworkFigures,
    OfferedRequest,
    Role,
    RouterPolicy,
    RunMetrics,
    RunReport,
    ServiceLevel,
    Simulation,
    SimulationError,
    SimulationStalledError,
)
from batch_manager.simulate.network import Network, fair_shares

CONFIG = BatchManagerConfig(max_batch_size=8, max_num_tokens=64)
KV_CONFIG = KvCacheConfig(num_blocks=200, tokens_per_block=4)
COST = LinearCost(constant=1.0)
BYTES = 10.0
"""Of a token's keys and values."""


def spec(role: Role, cost: LinearCost = COST, config: BatchManagerConfig = CONFIG) -> InstanceSpec:
    return InstanceSpec(role, config, KV_CONFIG, cost)


def parted(num_context: int = 1, num_generation: int = 1) -> list[InstanceSpec]:
    return [spec(Role.CONTEXT)] * num_context + [spec(Role.GENERATION)] * num_generation


def run(
    instances: Sequence[InstanceSpec],
    offered: Sequence[OfferedRequest],
    network: NetworkFigures | None = None,
    deaths: Sequence[Death] = (),
    router: RouterPolicy = RouterPolicy.KV_AWARE,
) -> ClusterReport:
    """Runs to the end, and checks that nothing is held any more."""
    cluster = Cluster(instances, BYTES, network, router, ClusterMetrics(), deaths)
    cluster.run(offered)
    for member in cluster.members:
        assert (member.num_requests, member.num_pending_tokens, member.num_active_tokens) == (0, 0, 0)
        if member.is_alive and member.kv is not None:
            member.kv.check_invariants()
            assert member.kv.num_free_blocks == member.kv.num_blocks
            assert not member.kv.leases.leases
    return ClusterReport.of(cluster)


@st.composite
def workloads(draw: st.DrawFn) -> list[OfferedRequest]:
    now = 0.0
    offered = []
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.3, 1.0, 7.0]))
        prefix = [draw(st.integers(0, 2))] * draw(st.sampled_from([1, 8, 30]))
        prompt = prefix + [draw(st.integers(3, 9))] * draw(st.integers(0, 40))
        count = draw(st.integers(1, 12))
        limit = draw(st.sampled_from([None, count + 5]))
        offered.append(OfferedRequest(now, prompt, count, limit))
    return offered


CONFIGS = st.sampled_from(
    [
        CONFIG,
        BatchManagerConfig(max_batch_size=4, max_num_tokens=32, max_steps_in_flight=2),
        BatchManagerConfig(
            max_batch_size=8, max_num_tokens=64, capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
    ]
)
TIGHT = KvCacheConfig(num_blocks=30, tokens_per_block=4)
"""Holds one request of the longest kind, and hardly a second one."""


# What always holds


@given(workloads(), CONFIGS, st.sampled_from([KV_CONFIG, TIGHT]))
@settings(max_examples=60, deadline=None)
def test_a_cluster_of_one_instance_is_the_simulation_of_one(
    offered: list[OfferedRequest], config: BatchManagerConfig, kv_config: KvCacheConfig
) -> None:
    cost = LinearCost(0.5, per_context_token=0.01, per_kv_token=0.001, overhead=0.1)
    alone = RunMetrics()
    Simulation(config, kv_config, cost, [alone]).run(offered)
    cluster = Cluster([InstanceSpec(Role.BOTH, config, kv_config, cost)], BYTES)
    cluster.run(offered)
    assert RunReport.of(cluster.members[0].metrics) == RunReport.of(alone)
    whole, expected = ClusterReport.of(cluster), RunReport.of(alone)
    for name in ("time_to_first_token", "inter_token", "end_to_end"):
        assert getattr(whole, name).to_json() == pytest.approx(getattr(expected, name).to_json()), name
    for name in ("duration", "num_ended", "goodput", "cache_hits"):
        assert getattr(whole, name) == pytest.approx(getattr(expected, name)), name


ROLES = st.lists(st.sampled_from(list(Role)), min_size=0, max_size=3).map(
    lambda roles: [Role.CONTEXT, Role.GENERATION, Role.BOTH, *roles]
)


@given(
    workloads(),
    ROLES,
    CONFIGS,
    st.sampled_from([KV_CONFIG, TIGHT]),
    st.sampled_from(list(RouterPolicy)),
    st.sampled_from([math.inf, 1000.0, 50.0]),
    st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(0, 5)), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_every_request_gets_all_its_tokens_whatever_dies(
    offered: list[OfferedRequest],
    roles: list[Role],
    config: BatchManagerConfig,
    kv_config: KvCacheConfig,
    router: RouterPolicy,
    bandwidth: float,
    deaths: list[tuple[float, int]],
) -> None:
    """The instance that does both, number 2, survives."""
    doomed = [Death(time, number) for time, number in deaths if number < len(roles) and number != 2]
    instances = [InstanceSpec(role, config, kv_config, COST) for role in roles]
    report = run(instances, offered, NetworkFigures(bandwidth, 0.25), doomed, router)
    assert sum(report.num_ended.values()) == report.num_requests == len(offered)
    assert set(report.num_ended) <= {"LENGTH", "END_ID"}
    assert report.num_output_tokens == sum(request.num_output_tokens for request in offered)
    assert sum(part.num_output_tokens for part in report.instances) == report.num_output_tokens
    if not doomed:
        assert report.num_rerouted == report.num_lost_tokens == report.num_lost_transfers == 0


@given(workloads(), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_the_same_cluster_gives_the_same_report(offered: list[OfferedRequest], dying: int) -> None:
    instances = [*parted(2, 1), spec(Role.BOTH)]
    deaths = [] if dying == 3 else [Death(5.0, dying)]
    first, second = (run(instances, offered, NetworkFigures(100.0, 0.1), deaths) for _ in range(2))
    assert first == second


# Network


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=12),
    st.lists(st.floats(0.1, 1e3), min_size=8, max_size=8),
    st.floats(0.1, 1e3),
)
def test_shares_are_fair_and_no_link_carries_more_than_it_can(
    ends: list[tuple[int, int]], ports: list[float], fabric: float
) -> None:
    paths = [(source, 8, target) for source, target in ends]
    capacities = dict(enumerate([*ports, fabric]))
    rates = fair_shares(paths, capacities)
    carried = {link: [rate for path, rate in zip(paths, rates, strict=True) if link in path] for link in capacities}
    for link, capacity in capacities.items():
        assert sum(carried[link]) <= capacity * (1 + 1e-9)
    for path, rate in zip(paths, rates, strict=True):
        assert any(
            sum(carried[link]) >= capacities[link] * (1 - 1e-9) and rate >= max(carried[link]) * (1 - 1e-9)
            for link in path
        ), "somebody could get more without taking it from one who has less"


def test_two_transfers_into_one_port_take_twice_as_long_and_speed_up_when_one_has_gone() -> None:
    network = Network(NetworkFigures(bytes_per_second=10.0, latency=0.5))
    network.begin(0.0, 1, 0, 2, 100.0)
    network.begin(0.0, 2, 1, 2, 50.0)
    arrivals = []
    while (time := network.next_event) is not None:
        arrivals += [(time, transfer.request_id) for transfer in network.take_arrived(time)]
    assert arrivals == [(10.5, 2), (15.5, 1)]


def test_a_dropped_transfer_leaves_its_bandwidth_to_the_others() -> None:
    network = Network(NetworkFigures(fabric_bytes_per_second=10.0))
    network.begin(0.0, 1, 0, 1, 100.0)
    dropped = network.begin(0.0, 2, 2, 3, 100.0)
    network.drop(4.0, dropped)
    assert network.next_event == pytest.approx(4.0 + 8.0)
    assert network.num_transfers == 1


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        ({"bytes_per_second": 0.0}, "bytes_per_second is 0.0; it must be above 0"),
        ({"latency": -1.0}, "latency is -1.0 s"),
    ],
)
def test_a_network_that_cannot_be_is_refused_by_name(figures: dict[str, float], complaint: str) -> None:
    with pytest.raises(SimulationError, match=complaint):
        NetworkFigures(**figures)


# Context here, generation there


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 64, 100])
def test_a_free_network_makes_parted_roles_as_fast_as_one_instance(num_prompt_tokens: int) -> None:
    offered = [OfferedRequest(0.0, [5] * num_prompt_tokens, 10)]
    together, apart = run([spec(Role.BOTH)], offered), run(parted(), offered)
    assert apart.end_to_end == together.end_to_end
    assert apart.time_to_first_token == together.time_to_first_token
    assert apart.inter_token == together.inter_token
    assert apart.num_transferred_tokens == num_prompt_tokens


def test_bytes_and_latency_lie_between_the_first_and_the_second_token() -> None:
    offered = [OfferedRequest(0.0, [5] * 60, 4)]
    free, slow = run(parted(), offered), run(parted(), offered, NetworkFigures(100.0, 0.5))
    assert slow.transfer.max == pytest.approx(60 * BYTES / 100.0 + 0.5)
    assert slow.end_to_end.max == pytest.approx(free.end_to_end.max + slow.transfer.max)
    assert slow.inter_token.max == pytest.approx(1.0 + slow.transfer.max)
    assert slow.time_to_first_token == free.time_to_first_token
    assert slow.num_transferred_bytes == 60 * BYTES


@given(workloads(), st.floats(20.0, 1e4))
@settings(max_examples=30, deadline=None)
def test_a_slower_network_never_moves_other_bytes_of_a_lone_request(
    offered: list[OfferedRequest], bandwidth: float
) -> None:
    lone = [request._replace(arrival_time=1000.0 * number) for number, request in enumerate(offered)]
    free, slow = run(parted(), lone), run(parted(), lone, NetworkFigures(bandwidth))
    assert slow.num_transferred_tokens == free.num_transferred_tokens
    assert slow.end_to_end.mean >= free.end_to_end.mean
    assert slow.time_to_first_token == free.time_to_first_token


def test_only_blocks_that_are_missing_cross_the_network() -> None:
    offered = [OfferedRequest(100.0 * number, [9] * 40 + [number] * 4, 4) for number in range(3)]
    report = run(parted(), offered)
    assert report.num_transferred_tokens == 44 + 4 + 4


def test_a_receiver_without_room_lets_the_sender_keep_the_blocks() -> None:
    """The transfer starts when blocks are there, not when the context ends; until it is over the sender keeps its."""
    small = InstanceSpec(Role.GENERATION, CONFIG, KvCacheConfig(num_blocks=20, tokens_per_block=4), COST)
    offered = [OfferedRequest(0.0, [number] * 50, 20) for number in range(4)]
    report = run([spec(Role.CONTEXT), small], offered, NetworkFigures(1000.0))
    assert report.num_ended == {"LENGTH": 4}
    assert report.inter_token.max > 2.5 * 20
    assert report.instances[1].peak_used_blocks <= 20
    assert report.transfer.max == pytest.approx(0.5)


def test_a_request_of_one_token_never_leaves_the_context_instance() -> None:
    report = run(parted(), [OfferedRequest(0.0, [1] * 8, 1), OfferedRequest(0.0, [2] * 8, 1, 5)])
    assert report.num_ended == {"LENGTH": 1, "END_ID": 1}
    assert report.num_transferred_tokens == 0
    assert report.instances[1].num_requests == 0


def test_callers_that_give_up_and_deadlines_end_requests_on_their_way() -> None:
    offered = [
        OfferedRequest(0.0, [1] * 40, 10, cancel_after=3.0),
        OfferedRequest(0.0, [2] * 40, 10, allotted_time=3.5),
        OfferedRequest(0.0, [3] * 8, 10),
    ]
    report = run(parted(), offered, NetworkFigures(100.0))
    assert report.num_ended == {"LENGTH": 1, "TIMED_OUT": 1, "CANCELLED": 1}


# Deaths


def test_a_dead_generation_instance_loses_no_token() -> None:
    offered = [OfferedRequest(0.0, [number] * 16, 20) for number in range(6)]
    report = run(parted(1, 2), offered, deaths=[Death(8.5, 1)])
    assert report.num_ended == {"LENGTH": 6}
    assert report.num_output_tokens == 6 * 20
    assert report.num_rerouted == 3
    assert report.num_lost_tokens > 3 * 16
    assert not report.instances[1].is_alive


def test_a_sender_that_dies_under_a_transfer_makes_the_receiver_compute() -> None:
    offered = [OfferedRequest(0.0, [7] * 40, 5)]
    report = run([*parted(2, 1)], offered, NetworkFigures(100.0), [Death(2.0, 0)])
    assert report.num_ended == {"LENGTH": 1}
    assert (report.num_lost_transfers, report.num_rerouted) == (1, 0)
    assert report.end_to_end.max == pytest.approx(2.0 + 4.0), "the death, and four steps: a context and three tokens"


def test_a_receiver_that_dies_under_a_transfer_is_replaced() -> None:
    offered = [OfferedRequest(0.0, [7] * 40, 5)]
    report = run([*parted(1, 2)], offered, NetworkFigures(100.0), [Death(2.0, 1)])
    assert report.num_ended == {"LENGTH": 1}
    assert report.num_rerouted == 1
    assert report.cache_hits > 0.8, "the context instance has the prompt in its cache"


def test_the_death_of_the_last_instance_of_a_role_says_which_role_is_missing() -> None:
    offered = [OfferedRequest(0.0, [7] * 40, 5)]
    with pytest.raises(SimulationError, match=r"at 0\.5 s no instance is there that begins requests"):
        run(parted(1, 1), offered, deaths=[Death(0.5, 0)])


# Routing


def cached_with(router: RouterPolicy) -> float:
    """Cache hits of three conversations whose turns come in turn, on two instances."""
    turns = [(turn, talk) for turn in range(6) for talk in range(3)]
    offered = [OfferedRequest(10.0 * index, [talk] * (16 * (turn + 1)), 4) for index, (turn, talk) in enumerate(turns)]
    return run([spec(Role.BOTH)] * 2, offered, router=router).cache_hits


def test_a_kv_aware_router_sends_prompts_to_where_their_prefix_is() -> None:
    assert cached_with(RouterPolicy.KV_AWARE) > cached_with(RouterPolicy.ROUND_ROBIN) + 0.2


def test_round_robin_gives_each_instance_as_many_requests() -> None:
    offered = [OfferedRequest(0.0, [number] * 8, 4) for number in range(9)]
    report = run([spec(Role.BOTH)] * 3, offered, router=RouterPolicy.ROUND_ROBIN)
    assert [part.num_requests for part in report.instances] == [3, 3, 3]


def test_least_loaded_avoids_the_instance_that_is_slow() -> None:
    offered = [OfferedRequest(1.0 * number, [number] * 8, 4) for number in range(40)]
    slow = spec(Role.BOTH, LinearCost(constant=4.0))
    report = run([slow, spec(Role.BOTH)], offered, router=RouterPolicy.LEAST_LOADED)
    assert report.instances[1].num_requests > 1.5 * report.instances[0].num_requests


# What cannot be


@pytest.mark.parametrize(
    ("instances", "complaint"),
    [
        ([], "no instance is there that begins requests; roles context and both do"),
        ([spec(Role.GENERATION)], "no instance is there that begins requests"),
        ([spec(Role.CONTEXT)], "no instance is there that goes on with requests; roles generation and both do"),
        ([InstanceSpec(Role.CONTEXT, CONFIG, None, COST)], r"instance 0 \(context\) has no KV cache"),
    ],
)
def test_a_cluster_without_one_of_its_parts_is_refused(instances: list[InstanceSpec], complaint: str) -> None:
    with pytest.raises(SimulationError, match=complaint):
        Cluster(instances, BYTES)


def test_the_death_of_an_instance_that_is_not_there_is_refused() -> None:
    with pytest.raises(SimulationError, match="instance 2 is to die; there are 0 to 1"):
        Cluster(parted(), BYTES, deaths=[Death(1.0, 2)])


def test_a_cluster_that_cannot_go_on_says_what_its_requests_wait_for() -> None:
    cluster = Cluster([spec(Role.BOTH)], BYTES)
    cluster.members[0].instance.manager.pause()
    with pytest.raises(SimulationStalledError, match="request 0 waits for paused_by_operator"):
        cluster.run([OfferedRequest(0.0, [1], 5)])


def test_goodput_is_that_of_whole_requests() -> None:
    offered = [OfferedRequest(0.0, [number] * 64, 5) for number in range(4)]
    level = ServiceLevel(time_to_first_token=2.5, time_per_output_token=1.5)
    cluster = Cluster(parted(), BYTES, metrics=ClusterMetrics(level))
    cluster.run(offered)
    assert ClusterReport.of(cluster).served_well == pytest.approx(2 / 4), "contexts take one step each, one by one"


def test_a_report_can_be_read_by_people_and_programs() -> None:
    report = run(parted(), [OfferedRequest(0.0, [1] * 40, 3)], NetworkFigures(100.0), [Death(1.5, 0)])
    assert "context (dead)" in report.table()
    assert "1 transfers lost" in report.table()
    assert report.to_json()["num_lost_transfers"] == 1
