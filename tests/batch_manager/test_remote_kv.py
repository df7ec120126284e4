"""Requests whose first blocks another instance sends."""

from __future__ import annotations

import pytest

from batch_manager import BatchManager, BatchManagerConfig, FinishReason, KvCacheManager, Request, WaitCode
from batch_manager.kv import BlockOwnershipError, KvCacheConfig

PROMPT = list(range(10))


def managers(num_blocks: int = 8, **kv: object) -> tuple[BatchManager, KvCacheManager]:
    kv_manager = KvCacheManager(KvCacheConfig(num_blocks=num_blocks, tokens_per_block=4, **kv))  # type: ignore[arg-type]
    return BatchManager(BatchManagerConfig(max_batch_size=4, max_num_tokens=32), kv_manager), kv_manager


def remote_request(request_id: int = 1, **fields: int) -> Request:
    """A prompt of ten tokens and a first generated one; another instance has the prompt's keys and values."""
    return Request(request_id, PROMPT, 4, generated_token_ids=[77], num_remote_tokens=10, **fields)


def test_it_holds_blocks_but_does_not_run_before_they_are_there() -> None:
    manager, kv = managers()
    request = remote_request()
    manager.add_request(request)
    assert manager.schedule().is_empty
    assert kv.take_remote_loads() == [request]
    assert len(request.block_ids) == 3
    assert manager.schedule().is_empty
    reason = manager.explain(1)
    assert reason is not None
    assert reason.code is WaitCode.REMOTE_KV
    kv.check_invariants()


def test_it_goes_on_with_its_second_token_once_they_are_there() -> None:
    manager, kv = managers()
    request = remote_request()
    manager.add_request(request)
    manager.schedule()
    kv.acknowledge_remote_load(request)
    for expected_start in (10, 11, 12):
        plan = manager.schedule()
        assert [(entry.start, entry.num_scheduled_tokens) for entry in plan.scheduled] == [(expected_start, 1)]
        progress = manager.update(plan, [[5]])
    assert progress[0].finish_reason is FinishReason.LENGTH
    assert request.token_ids == [*PROMPT, 77, 5, 5, 5]
    assert request.receipt.num_transferred_tokens == 10
    assert request.receipt.num_computed_tokens == 3


def test_what_was_received_is_found_by_the_next_request() -> None:
    manager, kv = managers()
    request = remote_request()
    manager.add_request(request)
    manager.schedule()
    kv.acknowledge_remote_load(request)
    manager.update(manager.schedule(), [[5]])
    assert kv.find_reuse(Request(2, PROMPT, 1)).num_tokens == 8


def test_received_in_vain_it_computes_its_context() -> None:
    manager, kv = managers()
    request = remote_request()
    manager.add_request(request)
    manager.schedule()
    manager.restart([request])
    plan = manager.schedule()
    assert [(entry.start, entry.num_scheduled_tokens) for entry in plan.scheduled] == [(0, 11)]
    assert kv.take_remote_loads() == []
    with pytest.raises(BlockOwnershipError, match="does not wait"):
        kv.acknowledge_remote_load(request)


def test_cancelled_on_the_way_its_leased_blocks_stay_until_the_lease_ends() -> None:
    """Whoever writes them has not stopped yet."""
    manager, kv = managers()
    request = remote_request()
    manager.add_request(request)
    manager.schedule()
    lease = kv.lease(request, "transfer")
    manager.cancel_request(1)
    assert kv.num_free_blocks == 5
    kv.check_invariants()
    kv.end_lease(lease)
    assert kv.num_free_blocks == 8
    with pytest.raises(BlockOwnershipError, match="does not wait"):
        kv.acknowledge_remote_load(request)


def test_what_the_cache_has_is_not_waited_for() -> None:
    """The prompt's two full blocks are cached; only its last two tokens are missing."""
    manager, kv = managers()
    first = Request(1, PROMPT, 1)
    manager.add_request(first)
    manager.update(manager.schedule(), [[77]])
    request = remote_request(2)
    manager.add_request(request)
    assert manager.schedule().is_empty
    assert kv.take_remote_loads() == [request]
    assert request.num_computed_tokens == 8


def test_with_nothing_missing_it_runs_at_once() -> None:
    manager, kv = managers()
    first = Request(1, list(range(8)), 1)
    manager.add_request(first)
    manager.update(manager.schedule(), [[77]])
    request = Request(2, list(range(8)), 4, generated_token_ids=[77], num_remote_tokens=8)
    manager.add_request(request)
    assert [entry.start for entry in manager.schedule().scheduled] == [8]
    assert kv.take_remote_loads() == [request]
