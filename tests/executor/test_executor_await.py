"""`await_responses`: by id, by ids, of all, with and without a time limit, and when the executor goes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from executor import (
    Executor,
    ExecutorShutDownError,
    InvalidRequestError,
    LoraConfig,
    QueueFullError,
    Response,
    UnsupportedFeatureError,
)
from tests.executor.driving import WAIT, OpenExecutor, finish, request, run_one, wait_until


def test_waiting_for_any_gives_the_responses_of_all(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    ids = executor.enqueue_requests([request([3 + index], 4, streaming=True) for index in range(3)])
    got: list[Response] = []
    while sum(each.is_final for each in got) < 3:
        responses = executor.await_responses(WAIT)
        assert responses
        got += responses
    assert sorted({each.request_id for each in got}) == ids
    assert len(got) == 12
    assert executor.await_responses(timeout=timedelta(0)) == []


def test_several_ids_share_one_time_limit(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    with executor._loop.batch_manager_lock:
        ids = executor.enqueue_requests([request([3], 2), request([4] * 10, 200), request([5], 200)])
        started = time.monotonic()
        assert executor.await_responses(ids=ids, timeout=timedelta(milliseconds=60)) == [[], [], []]
        assert 0.06 <= time.monotonic() - started < 5
    for each in ids:
        executor.cancel_request(each)
        finish(executor, each)


def test_polling_several_ids_until_all_have_ended_tells_which_had_ended_before(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    ids = executor.enqueue_requests([request([3], 2), request([4], 30)])
    num_final = 0
    errors: list[Response] = []
    while num_final < 2:
        for responses in executor.await_responses(ids, timedelta(milliseconds=5)):
            for response in responses:
                if response.has_error():
                    errors.append(response)
                else:
                    num_final += response.result.is_final
    answers = executor.await_responses([*ids, 10_000], timedelta(0))
    errors += [response for responses in answers for response in responses]
    assert {each.request_id for each in errors} == {*ids, 10_000}
    assert all(isinstance(each.error, InvalidRequestError) for each in errors)
    assert all("final response was taken already" in each.error_msg for each in errors)


def test_counts_of_ready_responses(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    ids = executor.enqueue_requests([request([3], 4, streaming=True), request([4], 4)])
    wait_until(lambda: executor.num_unfinished_requests == 0)
    assert [executor.get_num_responses_ready(each) for each in ids] == [4, 1]
    assert executor.get_num_responses_ready() == 5
    assert executor.get_num_responses_ready(999) == 0


def test_shutting_down_wakes_whoever_waits_for_any(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    answers: list[object] = []
    waiter = threading.Thread(target=lambda: answers.append(executor.await_responses()))
    waiter.start()
    time.sleep(0.05)
    executor.shutdown()
    waiter.join(30)
    assert not waiter.is_alive()
    assert answers == [[]]


def test_after_shutdown_what_is_left_can_be_taken_and_then_nothing(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    done = executor.enqueue_request(request([3], 2))
    wait_until(lambda: executor.get_num_responses_ready() == 1)
    running = executor.enqueue_request(request([3], 200))
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    responses = executor.await_responses()
    assert [each.request_id for each in responses] == [done, running]
    assert isinstance(responses[1].error, ExecutorShutDownError)
    with pytest.raises(ExecutorShutDownError):
        executor.await_responses()
    with pytest.raises(ExecutorShutDownError):
        executor.enqueue_request(request([3]))
    executor.cancel_request(running)
    assert executor.get_latest_iteration_stats()


def test_of_several_requests_all_are_queued_or_none(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_queue_size=2, max_batch_size=1)
    with pytest.raises(UnsupportedFeatureError):
        executor.enqueue_requests([request([3]), request([4], lora_config=LoraConfig(1))])
    with executor._loop.batch_manager_lock, pytest.raises(QueueFullError):
        executor.enqueue_requests([request([3]), request([4]), request([5])])
    assert executor.num_unfinished_requests == 0
    assert executor.await_responses(timedelta(milliseconds=20)) == []
    assert len(run_one(executor, request([3])).output_token_ids[0]) == 12


def test_many_threads_may_enqueue_await_and_cancel(open_executor: OpenExecutor) -> None:
    executor: Executor = open_executor(max_num_tokens=32)
    outcomes: list[tuple[int, int]] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        for turn in range(8):
            request_id = executor.enqueue_request(request([3 + number, 4 + turn], 15, streaming=turn % 2 == 0))
            if turn % 3 == 0:
                executor.cancel_request(request_id)
            responses = finish(executor, request_id)
            with lock:
                outcomes.append((request_id, sum(each.is_final for each in responses)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(dict(outcomes)) == 64
    assert all(num_final == 1 for _, num_final in outcomes)
    assert executor.get_num_responses_ready() == 0
