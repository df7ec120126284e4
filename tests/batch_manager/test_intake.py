"""What can never run is refused when it arrives, with the numbers that say why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    FinishReason,
    InvalidConfigError,
    RefusalReason,
    RequestRefused,
)
from tests.batch_manager.harness import Harness

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
MAX_REQUESTS = CapacitySchedulerPolicy.MAX_REQUESTS


def test_a_request_that_needs_more_blocks_than_there_are_is_refused_and_others_go_on() -> None:
    harness = Harness(num_blocks=10)
    harness.add(0, 10, 5)
    with pytest.raises(RequestRefused, match="need 11 blocks of 10 tokens, the whole pool has 10") as refused:
        harness.add(1, 60, 42)
    assert (refused.value.reason, refused.value.needed, refused.value.available) == (
        RefusalReason.EXCEEDS_KV_CACHE,
        11,
        10,
    )
    assert not refused.value.reason.is_temporary
    harness.run()


def test_a_request_that_needs_every_block_runs() -> None:
    harness = Harness(num_blocks=10)
    request = harness.add(0, 60, 41)
    harness.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_live_id_is_refused_and_free_again_after_the_end() -> None:
    harness = Harness()
    harness.add(0, 10, 1)
    with pytest.raises(RequestRefused, match="a live request has the same id") as refused:
        harness.add(0, 10, 1)
    assert refused.value.reason is RefusalReason.DUPLICATE_ID
    harness.run()
    harness.add(0, 10, 1)
    harness.run()


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "fields", "problem"),
    [
        ([], 5, {}, "the prompt is empty"),
        ([1], 0, {}, "max_new_tokens is 0"),
        ([1], 5, {"priority": 1.5}, "priority is 1.5; it must be in 0..1"),
        ([1], 5, {"priority": float("nan")}, "priority is nan"),
        ([1], 5, {"min_new_tokens": -1}, "min_new_tokens is -1"),
        ([1], 5, {"allotted_time": -1.0}, "allotted_time is -1.0"),
        ([1], 5, {"stop_words": [[1], []]}, "a stop word has no tokens"),
        ([1], 5, {"beam_width": 0}, "beam_width is 0"),
        ([1], 5, {"adapter_pages": -1}, "adapter_pages is -1"),
        ([1], 5, {"retention": "forever"}, "retention is 'forever'; it must be a KvCacheRetentionConfig"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(
    prompt: list[int], max_new_tokens: int, fields: dict[str, object], problem: str
) -> None:
    harness = Harness()
    with pytest.raises(RequestRefused, match=problem) as refused:
        harness.add(0, prompt, max_new_tokens, **fields)
    assert refused.value.reason is RefusalReason.INVALID_FIELD
    assert not harness.manager.has_work


def test_a_request_object_is_used_once() -> None:
    harness = Harness()
    request = harness.add(0, 10, 1)
    harness.run()
    with pytest.raises(RequestRefused, match="it has been used before"):
        harness.manager.add_request(request)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    harness = Harness(max_batch_size=1, max_queued_requests=2, max_queued_tokens=50)
    harness.add(0, 10, 5)
    harness.step()
    harness.add(1, 30, 5)
    with pytest.raises(RequestRefused, match="its 21 tokens and the 30 waiting ones exceed 50") as refused:
        harness.add(2, 21, 5)
    assert (refused.value.reason, refused.value.available) == (RefusalReason.QUEUE_FULL_TOKENS, 20)
    assert refused.value.reason.is_temporary
    harness.add(3, 20, 5)
    with pytest.raises(RequestRefused, match="2 requests are waiting, at most 2 may") as refused:
        harness.add(4, 1, 5)
    assert refused.value.reason is RefusalReason.QUEUE_FULL_REQUESTS
    harness.manager.cancel_request(1)
    harness.add(5, 30, 5)


def test_without_chunking_the_longest_possible_context_must_fit_an_iteration() -> None:
    harness = Harness(max_num_tokens=64, enable_chunked_context=False)
    harness.add(0, 64, 50)
    with pytest.raises(RequestRefused, match="up to 65 tokens must fit one iteration") as refused:
        harness.add(1, 65, 1)
    assert refused.value.reason is RefusalReason.EXCEEDS_TOKEN_BUDGET
    harness = Harness(max_num_tokens=64, enable_chunked_context=False, capacity_scheduler_policy=MAX_UTILIZATION)
    with pytest.raises(RequestRefused, match="up to 113 tokens must fit one iteration"):
        harness.add(0, 64, 50)


def test_an_adapter_larger_than_its_cache_is_refused() -> None:
    harness = Harness(num_adapter_pages=30)
    with pytest.raises(RequestRefused, match="adapter 4 takes 31 pages, the adapter cache has 30") as refused:
        harness.add(0, 10, 1, adapter_id=4, adapter_pages=31)
    assert refused.value.reason is RefusalReason.EXCEEDS_ADAPTER_PAGES


def test_a_beam_wider_than_the_budget_is_refused() -> None:
    harness = Harness(max_num_tokens=8)
    with pytest.raises(RequestRefused, match="a step of beam_width 9 exceeds max_num_tokens"):
        harness.add(0, 4, 1, beam_width=9)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, not 0"),
        ({"max_num_tokens": 0}, "max_num_tokens must be at least 1"),
        ({"max_queued_requests": -1}, "max_queued_requests must be at least 0"),
        ({"max_steps_in_flight": 3}, "max_steps_in_flight must be 1 or 2"),
        ({"min_rows_per_sequence": 3}, "min_rows_per_sequence must be 1 or 2"),
        ({"priority_ageing": 0.0}, "priority_ageing must be above 0 seconds"),
        ({"max_num_tokens": 1, "min_rows_per_sequence": 2}, "no sequence would fit"),
        ({"max_num_tokens": 8, "chunk_unit_size": 16}, "no chunk would fit"),
        ({"long_prompt_cap": 8, "chunk_unit_size": 16}, "long_prompt_cap .8. must be at least chunk_unit_size"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights.'a'. must be a finite number above 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidConfigError, match=problem):
        BatchManagerConfig(**fields)  # type: ignore[arg-type]


def test_without_a_kv_cache_only_the_number_of_requests_counts() -> None:
    manager = BatchManager(BatchManagerConfig(capacity_scheduler_policy=MAX_REQUESTS, max_batch_size=2), None)
    harness = Harness()
    harness.manager = manager
    for request_id in range(3):
        harness.add(request_id, 1000, 1000)
    plan = harness.step()
    assert [entry.request.request_id for entry in plan.scheduled] == [0, 1]
    harness.run()
    with pytest.raises(InvalidConfigError, match="GUARANTEED_NO_EVICT without a KV cache"):
        BatchManager(BatchManagerConfig(), None)
    with pytest.raises(InvalidConfigError, match="MAX_REQUESTS with a KV cache"):
        BatchManager(BatchManagerConfig(capacity_scheduler_policy=MAX_REQUESTS), harness.kv)


# Changes while running


def test_a_change_that_cannot_be_made_while_running_is_refused_and_changes_nothing() -> None:
    harness = Harness(max_num_tokens=64)
    config = harness.manager.config
    for changed, problem in (
        (replace(config, max_steps_in_flight=2), "max_steps_in_flight cannot change while running"),
        (replace(config, capacity_scheduler_policy=MAX_REQUESTS), "from GUARANTEED_NO_EVICT to MAX_REQUESTS"),
    ):
        with pytest.raises(InvalidConfigError, match=problem):
            harness.manager.change_config(changed)
        assert harness.manager.config is config


def test_without_chunking_the_budget_cannot_fall_below_a_live_context() -> None:
    harness = Harness(max_num_tokens=64, enable_chunked_context=False)
    harness.add(5, 60, 40)
    with pytest.raises(InvalidConfigError, match="live request 5 needs up to 60 rows"):
        harness.manager.change_config(replace(harness.manager.config, max_num_tokens=32))
    with pytest.raises(InvalidConfigError, match="live request 5 needs up to 99 rows"):
        harness.manager.change_config(replace(harness.manager.config, capacity_scheduler_policy=MAX_UTILIZATION))
