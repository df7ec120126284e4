"""Requests end exactly once, in every state, and give everything back; limits and policies change under them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    FinishReason,
    KvCacheConfig,
    KvCacheManager,
    Phase,
    PlanningFailedError,
    Request,
    RequestState,
    ScheduledRequest,
    WaitCode,
    WaitingQueuePolicy,
    iteration_rows,
)
from batch_manager.policies.pause_governor import PauseGovernor
from tests.batch_manager.harness import Harness, ids, sizes

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def free_is_everything(harness: Harness) -> bool:
    harness.kv.check_invariants()
    return harness.kv.num_free_blocks == harness.kv.num_blocks


# Ends


@pytest.mark.parametrize("num_steps", [0, 1, 2, 42])
def test_a_request_can_be_cancelled_waiting_in_its_context_generating_and_paused(num_steps: int) -> None:
    harness = Harness(num_blocks=10, max_num_tokens=16, capacity_scheduler_policy=MAX_UTILIZATION)
    harness.add(0, 10, 80)
    request = harness.add(1, 10, 80)
    for _ in range(num_steps):
        harness.step()
    state = {0: RequestState.WAITING, 1: RequestState.RUNNING, 2: RequestState.RUNNING, 42: RequestState.PAUSED}
    assert request.state is state[num_steps]
    assert harness.manager.cancel_request(1)
    assert not harness.manager.cancel_request(1)
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, FinishReason.CANCELLED)
    harness.run()
    assert free_is_everything(harness)


def test_cancelling_follows_parked_requests_everywhere() -> None:
    harness = Harness(enable_block_reuse=True, num_adapter_pages=30)
    harness.add(0, range(25), 5, adapter_id=1, adapter_pages=20)
    harness.add(1, range(25), 5, adapter_id=1, adapter_pages=20)
    harness.add(2, 10, 5, adapter_id=2, adapter_pages=20)
    harness.add(3, 10, 5, held_for=WaitCode.GRAMMAR)
    plan = harness.manager.schedule()
    codes = {request_id: reason.code for request_id, reason in harness.manager.explain_all().items()}
    assert codes == {1: WaitCode.PREFIX_DEFERRED, 2: WaitCode.ADAPTER_PAGES, 3: WaitCode.GRAMMAR}
    for request_id in (1, 2, 3):
        assert harness.manager.cancel_request(request_id)
    assert harness.manager.num_waiting == 0
    harness.finish(plan)
    assert ids(harness.run()) == [[0]] * 4


def test_followers_go_on_when_their_contributor_is_cancelled() -> None:
    harness = Harness(enable_block_reuse=True, max_num_tokens=10)
    harness.add(0, range(40), 5)
    harness.add(1, range(40), 5)
    harness.step()
    harness.manager.cancel_request(0)
    assert sizes(harness.step()) == {1: 10}


def test_a_deadline_ends_a_request_while_it_is_still_queued() -> None:
    harness = Harness(max_batch_size=1)
    harness.add(0, 10, 50)
    queued = harness.add(1, 10, 5, allotted_time=3.0)
    plans = [harness.step() for _ in range(4)]
    assert [plan.timed_out for plan in plans] == [[], [], [], [queued]]
    assert queued.finish_reason is FinishReason.TIMED_OUT
    assert queued.receipt.admission_time is None
    assert queued.receipt.queue_seconds == 3.0


def test_a_deadline_ends_a_running_request_and_fires_without_traffic() -> None:
    harness = Harness()
    request = harness.add(0, 10, 50, allotted_time=3.0)
    plans = [harness.step() for _ in range(4)]
    assert plans[3].timed_out == [request]
    assert plans[3].is_empty
    assert free_is_everything(harness)
    held = harness.add(1, 10, 50, allotted_time=3.0, held_for=WaitCode.GRAMMAR)
    assert harness.manager.schedule().timed_out == []
    harness.clock.now += 3.0
    assert harness.manager.schedule().timed_out == [held]


def test_a_failed_step_ends_its_requests_and_leaves_nothing_of_it_behind() -> None:
    harness = Harness(enable_block_reuse=True, max_batch_size=2)
    failing = [harness.add(request_id, range(30), 5, cache_salt=request_id) for request_id in range(2)]
    other = harness.add(2, range(30), 5, cache_salt=0)
    plan = harness.manager.schedule()
    assert harness.manager.abandon(plan) == failing
    assert all(request.is_finished and not request.block_ids for request in failing)
    assert {request.finish_reason for request in failing} == {FinishReason.NOT_FINISHED}
    assert harness.kv.num_free_blocks == harness.kv.num_blocks
    harness.run()
    assert other.finish_reason is FinishReason.LENGTH
    assert other.receipt.num_reused_tokens == 0


def test_a_failed_step_does_not_end_requests_that_were_not_in_it() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(0, 10, 5)
    first = harness.manager.schedule()
    survivor = harness.add(1, 10, 5)
    second = harness.manager.schedule()
    assert ids([first, second]) == [[0], [0, 1]]
    assert [request.request_id for request in harness.manager.abandon(first)] == [0]
    assert survivor.state is RequestState.RUNNING
    harness.finish(second)
    harness.run()
    assert survivor.finish_reason is FinishReason.LENGTH


def test_planning_that_fails_for_one_request_ends_what_was_in_the_iteration_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(num_blocks=100)
    first = harness.add(0, 10, 5)
    harness.step()
    bad, later = harness.add(1, 10, 5), harness.add(2, 10, 5)
    find_reuse = harness.kv.find_reuse

    def failing(request: Request) -> object:
        if request is bad:
            raise ZeroDivisionError
        return find_reuse(request)

    monkeypatch.setattr(harness.kv, "find_reuse", failing)
    with pytest.raises(PlanningFailedError, match="requests that have ended: 0, 1") as failed:
        harness.manager.schedule()
    assert failed.value.ended == [first, bad]
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    harness.run()
    assert later.finish_reason is FinishReason.LENGTH
    assert free_is_everything(harness)


def test_an_update_that_fails_can_be_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(enable_block_reuse=True)
    failing = [harness.add(request_id, 10, 5) for request_id in range(2)]
    plan = harness.manager.schedule()
    other = harness.add(2, 10, 5)
    with monkeypatch.context() as broken:
        broken.setattr(harness.kv, "store", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            harness.finish(plan)
    assert harness.manager.abandon(plan) == failing
    harness.run()
    assert other.finish_reason is FinishReason.LENGTH
    assert free_is_everything(harness)


# Pauses


def test_pauses_never_change_what_a_request_generates() -> None:
    def outputs(num_blocks: int) -> dict[int, list[int]]:
        harness = Harness(num_blocks=num_blocks, capacity_scheduler_policy=MAX_UTILIZATION)
        requests = [harness.add(request_id, 10 + request_id, 80) for request_id in range(6)]
        harness.run()
        assert any(request.num_pauses for request in requests) == (num_blocks < 100)
        return {request.request_id: request.token_ids for request in requests}

    assert outputs(12) == outputs(1000)


@pytest.mark.parametrize("max_pauses", [1, 2, 3])
def test_no_request_is_paused_more_often_than_the_bound_however_bold_admission_is(
    max_pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PauseGovernor, "RISE", 0.0)
    chance = random.Random(max_pauses)
    most = 0
    for _ in range(20):
        harness = Harness(
            num_blocks=12,
            max_batch_size=8,
            capacity_scheduler_policy=MAX_UTILIZATION,
            max_pauses_per_request=max_pauses,
        )
        for request_id in range(20):
            harness.add(request_id, chance.randint(5, 30), chance.randint(20, 80))
        requests = list(harness.manager._life.requests.values())
        harness.run()
        most = max(most, *(request.num_pauses for request in requests))
    assert most == max_pauses


def test_a_partial_hit_that_would_cost_one_block_too_many_is_passed_over() -> None:
    """The block that is copied from stays beside its copy; a request that needs the whole pool cannot have that."""
    harness = Harness(num_blocks=6, tokens_per_block=4, enable_block_reuse=True)
    harness.add(0, range(1, 13), 1)
    harness.run()
    request = harness.add(1, [1, 2, 3, 4, 5, 6, 9, *range(20, 29)], 9)
    harness.step()
    assert (request.num_reused_tokens, len(request.block_ids)) == (4, 4)
    harness.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_paused_request_comes_back_before_later_ones_of_its_priority() -> None:
    harness = Harness(
        num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION, waiting_queue_policy=WaitingQueuePolicy.PRIORITY
    )
    harness.add(0, 10, 80)
    harness.add(1, 10, 80)
    for _ in range(42):
        harness.step()
    harness.add(2, 30, 10)
    for _ in range(38):
        harness.step()
    assert sizes(harness.step()) == {1: 51, 2: 30}


@pytest.mark.parametrize("shape", ["mixed", "equal", "long outputs", "long prompts", "early ends"])
@pytest.mark.parametrize(("seconds_per_step", "seconds_per_token"), [(0.01, 2e-5), (0.002, 1e-4)])
def test_a_pool_oversubscribed_three_times_does_not_thrash(
    shape: str, seconds_per_step: float, seconds_per_token: float
) -> None:
    """At most two pauses for each request, 20 % of the tokens recomputed, and 0.8 of the throughput without pauses."""

    def drawn(chance: random.Random) -> tuple[int, int]:
        return {
            "mixed": (chance.randint(10, 200), chance.randint(10, 300)),
            "equal": (100, 200),
            "long outputs": (20, chance.randint(100, 1000)),
            "long prompts": (chance.randint(500, 2000), chance.randint(10, 100)),
            "early ends": (chance.randint(10, 200), 600),
        }[shape]

    def throughput(policy: CapacitySchedulerPolicy) -> float:
        chance = random.Random(3)
        drawings = [drawn(chance) for _ in range(150)]
        ends = [chance.randint(10, 200) if shape == "early ends" else 10_000 for _ in drawings]
        mean = sum(prompt + new for prompt, new in drawings) / len(drawings)
        pool = max(int(32 * mean / 3 / 16), max(prompt + new for prompt, new in drawings) // 16 + 1)

        def tokens(entry: ScheduledRequest) -> list[int]:
            ended = entry.request.num_generated_tokens >= ends[entry.request.request_id]
            return [0 if ended else 5] if entry.samples else []

        harness = Harness(
            num_blocks=pool, tokens_per_block=16, max_batch_size=32, capacity_scheduler_policy=policy, tokens=tokens
        )
        requests = [harness.add(index, prompt, new, end_id=0) for index, (prompt, new) in enumerate(drawings)]
        seconds = sum(seconds_per_step + seconds_per_token * plan.num_tokens for plan in harness.run())
        assert max(request.num_pauses for request in requests) <= 2
        recomputed = sum(request.receipt.num_recomputed_tokens for request in requests)
        assert recomputed <= 0.2 * sum(request.receipt.num_computed_tokens for request in requests)
        return sum(request.num_generated_tokens for request in requests) / seconds

    assert throughput(MAX_UTILIZATION) >= 0.8 * throughput(GUARANTEED_NO_EVICT)


# Limits


def test_running_generations_keep_their_pace_while_a_long_prompt_arrives() -> None:
    harness = Harness(max_num_tokens=8192, long_prompt_cap=512, num_blocks=10_000)
    for request_id in range(8):
        harness.add(request_id, 100, 200)
    harness.step()
    harness.add(8, 32_768, 10)
    plans = [harness.step() for _ in range(65)]
    for plan in plans:
        assert set(sizes(plan)) >= set(range(8))
    assert max(plan.num_tokens for plan in plans) <= 512 + 8
    assert sizes(plans[63])[8] == 512
    assert sizes(plans[64])[8] == 1


def test_in_deterministic_mode_every_sequence_has_two_rows_and_the_budget_counts_them() -> None:
    harness = Harness(max_num_tokens=16, min_rows_per_sequence=2)
    harness.add(0, 1, 5)
    harness.add(1, 20, 3)
    rows = []
    while harness.manager.has_work:
        plan = harness.step()
        assert plan.num_tokens <= 16
        rows.append(
            [
                (entry.request.request_id, entry.start, entry.num_scheduled_tokens, entry.num_replayed_tokens)
                for entry in plan.scheduled
            ]
        )
    assert rows == [
        [(0, 0, 1, 0), (1, 0, 14, 0)],
        [(1, 14, 6, 0), (0, 1, 1, 1)],
        [(0, 2, 1, 1), (1, 20, 1, 1)],
        [(0, 3, 1, 1), (1, 21, 1, 1)],
        [(0, 4, 1, 1)],
    ]


def test_context_and_generation_share_an_iteration_and_the_table_shows_it() -> None:
    harness = Harness(max_num_tokens=16)
    harness.add(0, 10, 5)
    harness.add(1, 20, 5)
    harness.step()
    rows = iteration_rows(harness.manager.schedule())
    assert rows == [
        (1, 1, Phase.CONTEXT, 6, 20, 0, 14, 2),
        (1, 0, Phase.GENERATION, 10, 11, 0, 1, 2),
    ]


# Changes while running


def test_budget_batch_size_and_policies_change_and_nothing_in_flight_is_lost() -> None:
    harness = Harness(num_blocks=40, max_steps_in_flight=2)
    requests = [harness.add(request_id, 10, 30, tenant="ab"[request_id % 2]) for request_id in range(12)]
    in_flight = harness.manager.schedule()
    config = harness.manager.config
    for changed in (
        replace(config, max_batch_size=3, max_num_tokens=5),
        replace(config, capacity_scheduler_policy=MAX_UTILIZATION, waiting_queue_policy=WaitingQueuePolicy.FAIR),
        replace(config, waiting_queue_policy=WaitingQueuePolicy.FAIR, tenant_weights={"a": 3.0}),
        replace(config, capacity_scheduler_policy=CapacitySchedulerPolicy.STATIC_BATCH),
    ):
        harness.manager.change_config(changed)
        plan = harness.manager.schedule()
        assert len(plan.scheduled) <= changed.max_batch_size
        assert plan.num_tokens <= changed.max_num_tokens
        harness.finish(in_flight)
        in_flight = plan
    harness.finish(in_flight)
    harness.run()
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert free_is_everything(harness)


def test_running_requests_beyond_a_lowered_batch_size_wait_their_turn_and_are_told_so() -> None:
    harness = Harness()
    for request_id in range(3):
        harness.add(request_id, 10, 5)
    harness.step()
    harness.manager.change_config(replace(harness.manager.config, max_batch_size=2))
    assert sizes(harness.step()) == {0: 1, 1: 1}
    reason = harness.manager.explain(2)
    assert reason is not None
    assert (reason.code, reason.needed, reason.available) == (WaitCode.BATCH_SIZE, 3, 2)
    harness.run()


def test_an_overcommitted_pool_survives_the_change_to_guaranteed_completion() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION)
    for request_id in range(4):
        harness.add(request_id, 10, 80)
    harness.step()
    harness.manager.change_config(replace(harness.manager.config, capacity_scheduler_policy=GUARANTEED_NO_EVICT))
    harness.run()
    assert free_is_everything(harness)


def test_a_changed_queue_policy_reorders_what_waits() -> None:
    harness = Harness(max_batch_size=1)
    for request_id, priority in enumerate((0.5, 0.1, 0.9)):
        harness.add(request_id, 10, 1, priority=priority)
    harness.step()
    harness.manager.change_config(replace(harness.manager.config, waiting_queue_policy=WaitingQueuePolicy.PRIORITY))
    assert ids(harness.run()) == [[2], [1]]


def test_pause_keeps_everything_drain_lets_it_end_and_resume_goes_on() -> None:
    harness = Harness(num_blocks=10, max_batch_size=2, capacity_scheduler_policy=MAX_UTILIZATION)
    harness.add(0, 10, 80)
    paused = harness.add(1, 10, 80)
    never_run = harness.add(2, 10, 5)
    for _ in range(42):
        harness.step()
    harness.manager.pause()
    assert harness.manager.schedule().is_empty
    assert harness.manager.num_running == 1
    harness.manager.resume()
    harness.manager.drain()
    while not harness.manager.is_drained:
        assert not harness.step().is_empty
    assert paused.finish_reason is FinishReason.LENGTH
    assert never_run.state is RequestState.WAITING
    late = harness.add(3, 10, 5)
    assert harness.manager.schedule().is_empty
    harness.manager.resume()
    assert sizes(harness.step()) == {2: 10, 3: 10}
    harness.run()
    assert late.is_finished


# Receipts


def test_the_receipt_tells_what_a_request_cost() -> None:
    harness = Harness(num_blocks=10, capacity_scheduler_policy=MAX_UTILIZATION)
    first = harness.add(0, 10, 80)
    second = harness.add(1, 10, 80)
    harness.run()
    assert first.receipt.num_computed_tokens == 89
    assert first.receipt.num_recomputed_tokens == 0
    receipt = second.receipt
    assert receipt.num_computed_tokens == 50 + 89
    assert receipt.num_recomputed_tokens == 50
    [pause] = receipt.pauses
    assert pause == (41, WaitCode.KV_CAPACITY, 0, 50)
    assert (receipt.queue_seconds, receipt.paused_seconds) == (0.0, 39.0)
    assert receipt.finish_time == 119.0
    assert receipt.block_seconds == 1 + 10 * (2 + 3 + 4 + 5) + 10 * (6 + 7 + 8) + 9 * 9


def test_block_seconds_are_blocks_times_the_time_they_are_held() -> None:
    harness = Harness()
    request = harness.add(0, 10, 15)
    blocks = 0.0
    while harness.manager.has_work:
        plan = harness.manager.schedule()
        blocks += len(request.block_ids)
        harness.finish(plan)
    assert request.receipt.block_seconds == blocks


def test_reused_tokens_and_drafts_are_on_the_receipt() -> None:
    harness = Harness(enable_block_reuse=True)
    harness.add(0, range(25), 1)
    harness.run()
    request = harness.add(1, range(25), 10)
    harness.step()
    request.draft_token_ids = [1, 2, 3]
    plan = harness.manager.schedule()
    harness.manager.update(plan, [[1, 2, 9]])
    harness.run()
    receipt = request.receipt
    assert (receipt.num_draft_tokens, receipt.num_accepted_draft_tokens) == (3, 2)
    assert receipt.num_reused_tokens == 24
    assert receipt.num_computed_tokens == 25 + 10 - 1 - 24


def test_the_default_configuration_is_tensorrt_llms() -> None:
    config = BatchManagerConfig()
    assert config.capacity_scheduler_policy is GUARANTEED_NO_EVICT
    assert config.enable_chunked_context
    assert Request(0, [1], 1).priority == 0.5


class SlowToLoad(KvCacheManager):
    """Everything admitted waits for blocks from below until `is_slow` is unset."""

    is_slow = True

    def is_loading(self, request: Request) -> bool:
        return self.is_slow and request.num_reused_tokens > 0


def test_copies_of_a_request_that_cannot_run_yet_are_made_in_the_next_step_that_runs() -> None:
    """They went with the empty plan, which nobody executes, and the request computed on a block never filled."""
    kv = SlowToLoad(KvCacheConfig(num_blocks=8, tokens_per_block=4))
    manager = BatchManager(BatchManagerConfig(), kv)
    manager.add_request(Request(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    manager.update(manager.schedule(), [[10]])
    request = Request(2, [1, 2, 3, 4, 5, 6, 11], 1)
    manager.add_request(request)
    plan = manager.schedule()
    assert plan.is_empty
    assert plan.copies == []
    assert request.num_computed_tokens == 6
    kv.is_slow = False
    plan = manager.schedule()
    assert [(copy.target, copy.num_tokens) for copy in plan.copies] == [(request.block_ids[1], 2)]
    kv.check_invariants()
    manager.update(plan, [[10]])
    kv.check_invariants()
    assert kv.ledger().counts.used == 0
