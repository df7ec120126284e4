"""Receipts: what each request cost, told after it has ended."""

from __future__ import annotations

import time

import pytest

from batch_manager import WaitCode
from executor import (
    CapacitySchedulerPolicy,
    Executor,
    FinishReason,
    InvalidRequestError,
    KvCacheConfig,
    ReceiptNotFoundError,
    Request,
    RequestReceipt,
    SchedulerConfig,
)
from tests.executor.driving import OpenExecutor, finish, request, wait_until


def receipt_of(executor: Executor, wanted: Request) -> RequestReceipt:
    request_id = executor.enqueue_request(wanted)
    finish(executor, request_id)
    return executor.get_receipt(request_id)


def test_the_receipt_is_there_with_the_final_response(open_executor: OpenExecutor) -> None:
    receipt = receipt_of(open_executor(), request(list(range(2, 12)), 8, client_id=7))
    assert (receipt.client_id, receipt.error) == (7, "")
    [sequence] = receipt.sequences
    assert sequence.finish_reason is FinishReason.LENGTH
    assert (sequence.num_prompt_tokens, sequence.num_generated_tokens) == (10, 8)
    assert (sequence.num_computed_tokens, sequence.num_reused_tokens) == (10 + 8 - 1, 0)
    assert (sequence.num_recomputed_tokens, sequence.num_transferred_tokens, sequence.pauses) == (0, 0, ())
    assert 0 < sequence.block_seconds <= 5 * sequence.total_seconds
    assert 0 <= sequence.queue_seconds < sequence.total_seconds


def test_what_the_cache_saved_is_on_the_receipt(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    receipt_of(executor, request(list(range(2, 14)), 4))
    [sequence] = receipt_of(executor, request(list(range(2, 14)), 4)).sequences
    assert sequence.num_reused_tokens == 11
    assert sequence.num_computed_tokens == 12 + 4 - 1 - 11


def test_pauses_are_on_the_receipt_with_their_reason_and_what_they_cost(open_executor: OpenExecutor) -> None:
    executor = open_executor(
        kv_cache_config=KvCacheConfig(max_tokens=16 * 4, enable_block_reuse=False),
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
    )
    ids = executor.enqueue_requests([request([3 + index] * 8, 40) for index in range(2)])
    for each in ids:
        finish(executor, each)
    first, second = (executor.get_receipt(each).sequences[0] for each in ids)
    assert first.pauses == ()
    assert [pause.reason for pause in second.pauses] == [WaitCode.KV_CAPACITY] * len(second.pauses)
    assert second.num_recomputed_tokens == sum(pause.num_lost_tokens for pause in second.pauses) > 0
    assert second.num_computed_tokens == 8 + 40 - 1 + second.num_recomputed_tokens
    assert second.paused_seconds > 0


def test_a_request_cancelled_while_it_waits_has_only_queue_time(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    executor.pause()
    request_id = executor.enqueue_request(request([5, 6], 4))
    time.sleep(0.02)
    executor.cancel_request(request_id)
    finish(executor, request_id)
    [sequence] = executor.get_receipt(request_id).sequences
    assert sequence.finish_reason is FinishReason.CANCELLED
    assert sequence.queue_seconds == sequence.total_seconds >= 0.02
    assert (sequence.num_computed_tokens, sequence.block_seconds) == (0, 0.0)


def test_each_output_of_a_request_has_its_own_entry(open_executor: OpenExecutor) -> None:
    receipt = receipt_of(open_executor(), request([5, 6, 7], 6, num_return_sequences=3))
    assert [sequence.sequence_index for sequence in receipt.sequences] == [0, 1, 2]
    assert [sequence.num_generated_tokens for sequence in receipt.sequences] == [6, 6, 6]


def test_a_failed_request_has_a_receipt_with_its_error(
    open_executor: OpenExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor()

    def broken(*_: object) -> None:
        raise RuntimeError("no engine today")

    monkeypatch.setattr(executor._engine, "submit", broken)
    request_id = executor.enqueue_request(request([5, 6], 4))
    finish(executor, request_id)
    assert "no engine today" in executor.get_receipt(request_id).error


def test_only_the_latest_receipts_are_kept(open_executor: OpenExecutor) -> None:
    executor = open_executor(receipts_max_requests=2)
    ids = executor.enqueue_requests([request([3 + index], 1 + index) for index in range(3)])
    for each in ids:
        finish(executor, each)
    wait_until(lambda: executor.num_unfinished_requests == 0)
    with pytest.raises(ReceiptNotFoundError, match=rf"no receipt of request {ids[0]}: .* the last 2 "):
        executor.get_receipt(ids[0])
    assert [executor.get_receipt(each).request_id for each in ids[1:]] == ids[1:]


def test_a_live_request_has_no_receipt_yet(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    executor.pause()
    request_id = executor.enqueue_request(request([5], 4))
    with pytest.raises(ReceiptNotFoundError, match="has not ended"):
        executor.get_receipt(request_id)


def test_a_negative_number_of_receipts_is_refused(open_executor: OpenExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="receipts_max_requests is -1"):
        open_executor(receipts_max_requests=-1)
