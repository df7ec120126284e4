"""The small decisions by themselves: chunks, queues, deferral, adapter pages, the pause governor."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager import (
    BatchManagerConfig,
    ContextChunkingPolicy,
    Request,
    RequestState,
    WaitCode,
    WaitingQueuePolicy,
)
from batch_manager.policies.adapters import AdapterPages
from batch_manager.policies.chunking import ChunkRules, ContextDemand, make_chunking
from batch_manager.policies.deferral import common_prefix_length
from batch_manager.policies.pause_governor import PauseGovernor
from batch_manager.policies.queues import FairQueue, OrderedQueue, make_queue
from tests.batch_manager.harness import Harness, ids

FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS


def shares(
    policy: ContextChunkingPolicy, demands: Sequence[int], rows: int, unit: int = 1, min_rows: int = 1
) -> list[int]:
    whole = [ContextDemand(remaining, remaining) for remaining in demands]
    return make_chunking(policy, enabled=True).share(whole, rows, ChunkRules(unit, min_rows))


# Chunks


@pytest.mark.parametrize(
    ("policy", "demands", "rows", "unit", "expected"),
    [
        (FCFS, (100, 100), 64, 16, [64, 0]),
        (FCFS, (100, 100), 70, 16, [64, 0]),
        (FCFS, (50, 100), 70, 16, [50, 16]),
        (FCFS, (50, 7), 70, 16, [50, 7]),
        (EQUAL_PROGRESS, (100, 100), 64, 16, [32, 32]),
        (EQUAL_PROGRESS, (100, 100), 63, 16, [32, 16]),
        (EQUAL_PROGRESS, (12, 100), 64, 16, [12, 48]),
        (EQUAL_PROGRESS, (12, 12), 7, 5, [5, 0]),
        (EQUAL_PROGRESS, (7,), 7, 5, [7]),
        (EQUAL_PROGRESS, (5000, 3, 5000), 4096, 1, [2047, 3, 2046]),
    ],
)
def test_rows_are_shared_as_documented(
    policy: ContextChunkingPolicy, demands: Sequence[int], rows: int, unit: int, expected: list[int]
) -> None:
    assert shares(policy, demands, rows, unit) == expected


@given(
    policy=st.sampled_from(ContextChunkingPolicy),
    demands=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=8),
    rows=st.integers(0, 400),
    unit=st.integers(1, 20),
    min_rows=st.sampled_from([1, 2]),
)
def test_chunks_fit_the_rows_keep_to_units_and_respect_their_claims(
    policy: ContextChunkingPolicy, demands: list[tuple[int, int]], rows: int, unit: int, min_rows: int
) -> None:
    chunking, rules = make_chunking(policy, enabled=True), ChunkRules(unit, min_rows)
    claimed: list[ContextDemand] = []
    left = rows
    for remaining, limit in demands:
        demand = ContextDemand(remaining, min(remaining, limit))
        cost = chunking.claim(demand, left, rules)
        if cost:
            left -= cost
            claimed.append(demand)
    assert left >= 0
    sizes = chunking.share(claimed, rows, rules)
    assert sum(map(rules.cost, sizes)) <= rows
    for demand, size in zip(claimed, sizes, strict=True):
        assert 0 < size <= demand.limit
        assert size == demand.remaining or size % unit == 0


@given(
    demands=st.lists(st.integers(1, 300), max_size=8),
    rows=st.integers(0, 500),
    unit=st.integers(1, 20),
    min_rows=st.sampled_from([1, 2]),
)
def test_equal_progress_is_what_one_unit_at_a_time_gives(
    demands: list[int], rows: int, unit: int, min_rows: int
) -> None:
    rules, sizes = ChunkRules(unit, min_rows), [0] * len(demands)
    left, has_grown = rows, True
    while has_grown:
        has_grown = False
        for index, demand in enumerate(demands):
            longer = min(sizes[index] + unit, demand)
            extra = rules.cost(longer) - rules.cost(sizes[index])
            if longer > sizes[index] and extra <= left:
                sizes[index], left, has_grown = longer, left - extra, True
    assert shares(EQUAL_PROGRESS, demands, rows, unit, min_rows) == sizes


# Queues


def requests_of(tenants: str, **fields: object) -> list[Request]:
    return [Request(index, [1], 1, tenant=tenant, **fields) for index, tenant in enumerate(tenants)]  # type: ignore[arg-type]


def fill(queue: OrderedQueue | FairQueue, requests: Sequence[Request]) -> None:
    for sequence, request in enumerate(requests):
        request.order_key = queue.order_key(request, sequence)
        queue.push(request)


def empty(queue: OrderedQueue | FairQueue) -> list[int]:
    ids = []
    while (request := queue.peek()) is not None:
        assert queue.pop() is request
        ids.append(request.request_id)
    return ids


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (WaitingQueuePolicy.FCFS, [0, 1, 2, 3]),
        (WaitingQueuePolicy.PRIORITY, [3, 1, 2, 0]),
        (WaitingQueuePolicy.DEADLINE, [2, 0, 1, 3]),
    ],
)
def test_each_policy_has_its_order(policy: WaitingQueuePolicy, expected: list[int]) -> None:
    requests = [
        Request(0, [1], 1, priority=0.0, allotted_time=9.0),
        Request(1, [1], 1, priority=0.5),
        Request(2, [1], 1, priority=0.5, allotted_time=5.0),
        Request(3, [1], 1, priority=1.0),
    ]
    queue = make_queue(BatchManagerConfig(waiting_queue_policy=policy))
    fill(queue, requests)
    assert empty(queue) == expected


def test_a_request_of_lowest_priority_is_overtaken_only_by_what_arrives_within_the_ageing_time() -> None:
    queue = make_queue(BatchManagerConfig(waiting_queue_policy=WaitingQueuePolicy.PRIORITY, priority_ageing=60.0))
    old = Request(0, [1], 1, priority=0.0, arrival_time=0.0)
    urgent = [Request(1 + count, [1], 1, priority=1.0, arrival_time=10.0 * count) for count in range(10)]
    fill(queue, [old, *urgent])
    assert empty(queue) == [1, 2, 3, 4, 5, 6, 0, 7, 8, 9, 10]


@pytest.mark.parametrize("policy", WaitingQueuePolicy)
def test_finished_requests_are_dropped_and_soon_forgotten(policy: WaitingQueuePolicy) -> None:
    queue = make_queue(BatchManagerConfig(waiting_queue_policy=policy))
    requests = requests_of("a" * 100)
    fill(queue, requests)
    for request in requests[1:]:
        request.state = RequestState.FINISHED
        queue.discard(request)
    assert [request.request_id for request in queue] == [0]
    assert len((queue._heap if isinstance(queue, OrderedQueue) else queue._tenants["a"].heap)._entries) <= 3
    assert empty(queue) == [0]


def test_the_fair_queue_takes_turns_by_what_was_served() -> None:
    queue = FairQueue({"b": 2.0})
    requests = requests_of("aaaabbbb")
    fill(queue, requests)
    order = []
    while (request := queue.peek()) is not None:
        queue.pop()
        queue.charge(request, 10)
        order.append(request.tenant)
    assert "".join(order) == "abbabbaa"


def test_a_tenant_that_was_idle_has_no_claims_for_that_time() -> None:
    queue = FairQueue({})
    requests = requests_of("a" * 20 + "b" * 3)
    fill(queue, requests[:20])
    for _ in range(10):
        request = queue.peek()
        assert request is not None
        queue.pop()
        queue.charge(request, 100)
    for sequence, request in enumerate(requests[20:], start=20):
        request.order_key = queue.order_key(request, sequence)
        queue.push(request)
    order = []
    for _ in range(6):
        request = queue.peek()
        assert request is not None
        queue.pop()
        queue.charge(request, 100)
        order.append(request.tenant)
    assert Counter(order) == {"a": 3, "b": 3}


def test_the_fair_queue_remembers_a_bounded_number_of_idle_tenants() -> None:
    queue = FairQueue({})
    for index in range(10_000):
        [request] = requests_of("x")
        request.tenant = f"tenant {index}"
        fill(queue, [request])
        assert queue.peek() is request
        queue.pop()
        queue.charge(request, 1 + index % 7)
        assert queue.peek() is None
    assert len(queue._tenants) <= 2 * FairQueue.MAX_IDLE_TENANTS + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60), st.randoms())
def test_the_fair_queue_always_takes_from_the_tenant_that_was_served_least(
    arrivals: list[tuple[str, int]], chance: random.Random
) -> None:
    queue, weights = FairQueue({"a": 2.0}), {"a": 2.0}
    requests = [Request(index, [1], size, tenant=tenant) for index, (tenant, size) in enumerate(arrivals)]
    fill(queue, requests)
    waiting, service = Counter(tenant for tenant, _ in arrivals), Counter[str]()
    while (request := queue.peek()) is not None:
        queue.pop()
        least = min(service[tenant] for tenant, count in waiting.items() if count)
        assert service[request.tenant] == pytest.approx(least)
        waiting[request.tenant] -= 1
        tokens = chance.randint(0, request.max_new_tokens)
        queue.charge(request, tokens)
        service[request.tenant] += tokens / weights.get(request.tenant, 1.0)  # type: ignore[assignment]


@pytest.mark.parametrize("weights", [{}, {"busy": 3.0}, {"quiet": 2.0}])
def test_two_tenants_at_ten_to_one_offered_load_get_the_shares_of_their_weights(weights: dict[str, float]) -> None:
    harness = Harness(
        waiting_queue_policy=WaitingQueuePolicy.FAIR, tenant_weights=weights, max_batch_size=8, max_num_tokens=64
    )
    chance = random.Random(1)
    served: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    num_added = 0
    while harness.num_iterations < 4000:
        for tenant, depth in (("busy", 40), ("quiet", 4)):
            while waiting[tenant] < depth:
                harness.add(num_added, chance.randint(5, 40), chance.randint(5, 60), tenant=tenant)
                num_added += 1
                waiting[tenant] += 1
        for entry in harness.step().scheduled:
            served[entry.request.tenant] += entry.num_scheduled_tokens
            waiting[entry.request.tenant] -= entry.start == 0
    weight = {tenant: weights.get(tenant, 1.0) for tenant in ("busy", "quiet")}
    for tenant, tokens in served.items():
        assert tokens / served.total() == pytest.approx(weight[tenant] / sum(weight.values()), rel=0.05)


# Deferral, adapters, pauses


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.data())
def test_the_common_prefix_is_found_by_halves(first: list[int], second: list[int], data: st.DataObject) -> None:
    shared = data.draw(st.lists(st.integers(0, 2), max_size=40))
    expected = len(shared)
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        expected += 1
    known = data.draw(st.integers(0, len(shared)))
    assert common_prefix_length(shared + first, shared + second, known) == expected


def using(request_id: int, adapter_id: int, pages: int) -> Request:
    request = Request(request_id, [1], 1, adapter_id=adapter_id, adapter_pages=pages)
    request.order_key = (0.0, request_id)
    return request


def test_an_adapter_takes_its_pages_once() -> None:
    pages = AdapterPages(30)
    first, second, other = using(0, 7, 20), using(1, 7, 20), using(2, 8, 20)
    assert pages.acquire(first) == []
    assert pages.fits(second)
    assert not pages.fits(other)
    assert pages.acquire(second) == []
    assert pages.num_free_pages == 10
    assert pages.release(first) == pages.release(second) == []
    assert pages.num_free_pages == 30


def test_of_each_adapter_the_first_parked_request_is_woken_and_the_others_when_it_runs() -> None:
    pages = AdapterPages(30)
    running = using(0, 7, 20)
    pages.acquire(running)
    parked = [using(request_id, 8 + request_id % 2, 20) for request_id in range(1, 7)]
    for request in reversed(parked):
        pages.park(request)
    parked[0].state = RequestState.FINISHED
    assert pages.release(running) == [parked[1], parked[2]]
    assert pages.acquire(parked[1]) == [parked[3], parked[5]]
    assert pages.release(parked[1]) == [parked[4]]


def test_a_request_that_ends_in_line_hands_its_place_to_the_next_of_its_adapter() -> None:
    harness = Harness(num_adapter_pages=30, max_batch_size=1)
    harness.add(0, 10, 2, adapter_id=7, adapter_pages=20)
    for request_id in (1, 2):
        harness.add(request_id, 10, 2, adapter_id=8, adapter_pages=20)
    harness.manager.change_config(replace(harness.manager.config, max_batch_size=8))
    harness.step()
    harness.step()
    assert harness.manager.cancel_request(1)
    assert ids(harness.run()) == [[2], [2]]


def test_an_iteration_parks_a_bounded_number_of_requests() -> None:
    harness = Harness(enable_block_reuse=True, num_adapter_pages=10, max_batch_size=100, num_blocks=10_000)
    harness.add(0, range(20), 9, adapter_id=0, adapter_pages=10)
    for request_id in range(1, 501):
        harness.add(request_id, range(20), 2, adapter_id=request_id % 2, adapter_pages=10)
    for begun in (64, 128):
        harness.step()
        parked = [code for code in harness.manager.explain_all().values() if code.code is not WaitCode.NEXT_ITERATION]
        assert len(parked) <= begun
    harness.run()


def test_caution_rises_with_pauses_and_fades_with_completions() -> None:
    governor = PauseGovernor()
    assert governor.headroom(100) == 0
    for _ in range(100):
        governor.on_pause()
    assert governor.headroom(100) == 100
    for _ in range(500):
        governor.on_finish()
    assert governor.headroom(100) == 0
