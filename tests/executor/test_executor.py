"""The Executor from outside: requests in, responses out, on a tiny random model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from executor import (
    CapacitySchedulerPolicy,
    EngineStepError,
    Executor,
    ExecutorConfig,
    ExecutorShutDownError,
    FinishReason,
    InvalidRequestError,
    KvCacheConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    OutputConfig,
    QueueFullError,
    Request,
    Response,
    SamplingConfig,
    SchedulerConfig,
    UnsupportedFeatureError,
)
from executor.engines.interface import StepInputs

OpenExecutor = Callable[..., Executor]
WAIT = timedelta(seconds=30)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 128) for _ in range(source.randint(1, 40))] for _ in range(count)]


def request(prompt: list[int], max_tokens: int = 12, **fields: Any) -> Request:
    fields.setdefault("output_config", OutputConfig(exclude_input_from_output=True))
    return Request(prompt, max_tokens, **fields)


def finish(executor: Executor, request_id: int) -> list[Response]:
    """All responses of a request up to its final one."""
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        got = executor.await_responses(request_id, WAIT)
        assert got, f"request {request_id} gave no response in time"
        responses += got
    return responses


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]


def run(executor: Executor, requests: list[Request]) -> list[list[int]]:
    ids = executor.enqueue_requests(requests)
    return [tokens_of(finish(executor, request_id)) for request_id in ids]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


# -- outputs do not depend on how they were computed


def test_greedy_tokens_are_the_same_batched_alone_chunked_and_with_a_small_budget(open_executor: OpenExecutor) -> None:
    requests = [request(prompt) for prompt in prompts(12)]
    batched = run(open_executor(), requests)
    one_by_one = open_executor()
    assert [run(one_by_one, [each])[0] for each in requests] == batched
    assert run(open_executor(max_num_tokens=16), requests) == batched
    assert run(open_executor(max_num_tokens=7, max_batch_size=3), requests) == batched


def test_greedy_tokens_are_the_same_with_forced_pauses(open_executor: OpenExecutor) -> None:
    requests = [request(prompt, 40) for prompt in prompts(12)]
    expected = run(open_executor(), requests)
    policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    small = open_executor(scheduler_config=policy, kv_cache_config=KvCacheConfig(max_tokens=160))
    assert run(small, requests) == expected
    stats = [each.inflight_batching_stats for each in small.get_latest_iteration_stats()]
    assert sum(each.num_paused_requests for each in stats if each) > 0, "the pool was too large to force a pause"


def test_greedy_tokens_are_the_same_with_speculation(open_executor: OpenExecutor) -> None:
    looping = [[5, 6, 7, 8] * 6, [9, 10] * 9, *prompts(4)]
    plain = run(open_executor(), [request(prompt, 60) for prompt in looping])
    executor = open_executor()
    drafted = [request(prompt, 60, lookahead_config=LookaheadDecodingConfig()) for prompt in looping]
    assert run(executor, drafted) == plain
    stats = [each.spec_decoding_stats for each in executor.get_latest_iteration_stats()]
    assert sum(each.num_draft_tokens for each in stats if each) > 0


def test_logits_are_bit_equal_in_deterministic_mode_whatever_the_batch(open_executor: OpenExecutor) -> None:
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)

    def logits(executor: Executor, requests: list[Request]) -> list[np.ndarray]:
        ids = executor.enqueue_requests(requests)
        return [finish(executor, each)[-1].result.generation_logits for each in ids]

    requests = [request(prompt, output_config=output) for prompt in [[3], [4, 5], *prompts(8)]]
    together = logits(open_executor(deterministic=True), requests)
    alone = open_executor(deterministic=True)
    chunked = logits(open_executor(deterministic=True, max_num_tokens=8, max_batch_size=4), requests)
    for each, batched, small in zip(requests, together, chunked, strict=True):
        np.testing.assert_array_equal(logits(alone, [each])[0], batched)
        np.testing.assert_array_equal(small, batched)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(open_executor: OpenExecutor) -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=50, seed=7)
    seeded = request([5, 6, 7], 30, sampling_config=sampling)
    alone = run(open_executor(), [seeded])[0]
    others = [request(prompt, 20, sampling_config=SamplingConfig(temperature=1.5)) for prompt in prompts(10)]
    assert run(open_executor(), [*others[:5], seeded, *others[5:]])[5] == alone
    other_seed = request([5, 6, 7], 30, sampling_config=SamplingConfig(temperature=1.0, top_k=50, seed=8))
    assert run(open_executor(), [other_seed])[0] != alone


def test_a_cached_prefix_changes_no_token(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    shared = prompts(1, seed=3)[0] * 3
    first = finish(executor, executor.enqueue_request(request([*shared, 9])))
    again = finish(executor, executor.enqueue_request(request([*shared, 9])))
    assert tokens_of(first) == tokens_of(again)
    assert first[-1].result.usage.reused_tokens == 0
    assert again[-1].result.usage.reused_tokens >= len(shared) - 4


# -- responses


def test_streamed_tokens_add_up_to_the_whole_output(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    whole = run(executor, [request([3, 4, 5])])[0]
    responses = finish(executor, executor.enqueue_request(request([3, 4, 5], streaming=True)))
    assert len(responses) == 12
    assert tokens_of(responses) == whole
    assert [each.result.is_final for each in responses] == [False] * 11 + [True]


def test_a_whole_result_starts_with_the_prompt_unless_it_is_excluded(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    with_input = run(executor, [Request([3, 4, 5], 4)])[0]
    without = run(executor, [request([3, 4, 5], 4)])[0]
    assert with_input == [3, 4, 5, *without]


def test_streaming_all_tokens_so_far_repeats_them(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    every = request([3, 4, 5], 3, streaming=True, return_all_generated_tokens=True)
    lengths = [len(each.result.output_token_ids[0]) for each in finish(executor, executor.enqueue_request(every))]
    assert lengths == [1, 2, 3]


def test_the_end_id_ends_a_request_and_is_part_of_the_output(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    tokens = run(executor, [request([3, 4, 5])])[0]
    end_id = tokens[3]
    responses = finish(executor, executor.enqueue_request(request([3, 4, 5], end_id=end_id)))
    assert tokens_of(responses) == tokens[: tokens.index(end_id) + 1]
    assert responses[-1].result.finish_reasons == [FinishReason.END_ID]


def test_a_stop_word_of_two_tokens_ends_a_request(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    tokens = run(executor, [request([3, 4, 5])])[0]
    responses = finish(executor, executor.enqueue_request(request([3, 4, 5], stop_words=[tokens[2:4]])))
    assert responses[-1].result.finish_reasons == [FinishReason.STOP_WORDS]
    assert tokens_of(responses)[-2:] == tokens[2:4]


def test_return_sequences_share_the_id_and_only_the_last_is_final(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    sampling = SamplingConfig(temperature=1.0, top_k=100, seed=1)
    several = request([3, 4, 5], 10, num_return_sequences=4, sampling_config=sampling)
    request_id = executor.enqueue_request(several)
    responses = finish(executor, request_id)
    assert sorted(each.result.sequence_index for each in responses) == [0, 1, 2, 3]
    assert {each.request_id for each in responses} == {request_id}
    assert [each.result.is_final for each in responses] == [False, False, False, True]
    assert len({tuple(each.result.output_token_ids[0]) for each in responses}) > 1


def test_log_probs_come_with_each_token(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=True, num_top_log_probs=3)
    result = finish(executor, executor.enqueue_request(request([3, 4, 5], output_config=output)))[-1].result
    assert result.log_probs is not None
    assert result.top_log_probs is not None
    assert len(result.log_probs[0]) == len(result.top_log_probs) == 12
    for token, log_prob, top in zip(result.output_token_ids[0], result.log_probs[0], result.top_log_probs, strict=True):
        assert top[0][0] == token, "greedy takes the most likely token"
        assert top[0][1] == pytest.approx(log_prob, abs=1e-5)
    assert result.cum_log_probs == [pytest.approx(sum(result.log_probs[0]), abs=1e-4)]


def test_perf_metrics_tell_the_order_of_things(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    output = OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    metrics = finish(executor, executor.enqueue_request(request([3, 4, 5], output_config=output)))[
        -1
    ].result.request_perf_metrics
    assert metrics is not None
    timing = metrics.timing_metrics
    assert timing.arrival_time <= timing.first_scheduled_time <= timing.first_token_time <= timing.last_token_time
    assert metrics.last_iter == (metrics.first_iter or 0) + 11


def test_a_listener_hears_an_iteration_at_once_and_await_responses_nothing(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    heard: list[list[Response]] = []
    done = threading.Event()

    def listener(responses: list[Response]) -> None:
        heard.append(responses)
        if sum(each.is_final for batch in heard for each in batch) == 5:
            done.set()

    with executor._loop.batch_manager_lock:
        ids = [executor.enqueue_request(request([3, 4], streaming=True), listener=listener) for _ in range(5)]
    assert done.wait(30)
    assert [each.request_id for each in heard[0]] == ids, "requests that came together answer together"
    assert executor.get_num_responses_ready() == 0


def test_a_listener_that_raises_does_not_stop_the_others(open_executor: OpenExecutor) -> None:
    executor = open_executor()

    def faulty(_: list[Response]) -> None:
        raise RuntimeError("listener")

    executor.enqueue_request(request([3, 4]), listener=faulty)
    assert len(run(executor, [request([3, 4])])[0]) == 12


def test_awaiting_several_ids_gives_a_list_for_each(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    ids = executor.enqueue_requests([request([3]), request([4])])
    answers = executor.await_responses(ids, WAIT)
    assert [[each.request_id for each in answer] for answer in answers] == [[ids[0]], [ids[1]]]


def test_awaiting_a_request_that_has_ended_is_an_error_and_not_a_hang(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    request_id = executor.enqueue_request(request([3]))
    finish(executor, request_id)
    with pytest.raises(InvalidRequestError, match=f"request {request_id} is not known"):
        executor.await_responses(request_id)


def test_a_timeout_gives_an_empty_list(open_executor: OpenExecutor) -> None:
    assert open_executor().await_responses(timedelta(milliseconds=1)) == []


# -- bad requests


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"input_token_ids": []}, "input_token_ids is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"input_token_ids": [3, 128]}, r"input_token_ids\[1\] is 128; token ids are in \[0, 128\)"),
        ({"input_token_ids": [-1]}, r"input_token_ids\[0\] is -1"),
        ({"input_token_ids": ["a"]}, "input_token_ids must be a list of integers"),
        ({"input_token_ids": [3] * 256}, "max_input_len"),
        ({"max_tokens": 300}, "max_seq_len"),
        ({"end_id": 500}, "end_id"),
        ({"stop_words": [[]]}, "stop_words"),
        ({"bad_words": [[3, 999]]}, "bad_words"),
        ({"priority": 2.0}, "priority is 2.0"),
        ({"sampling_config": SamplingConfig(temperature=-1.0)}, "temperature"),
        ({"sampling_config": SamplingConfig(top_p=1.5)}, "top_p"),
        ({"sampling_config": SamplingConfig(beam_width=2)}, "beam_width"),
        ({"logits_post_processor_name": "nobody"}, "logits_post_processor_name"),
        ({"embedding_bias": [0.0]}, "embedding_bias"),
    ],
)
def test_a_bad_request_is_refused_by_name_twice_and_the_next_good_one_runs(
    open_executor: OpenExecutor, fields: dict[str, Any], names: str
) -> None:
    executor = open_executor()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=names):
            executor.enqueue_request(Request(**{"input_token_ids": [3, 4], "max_tokens": 4} | fields))
    assert len(run(executor, [request([3, 4])])[0]) == 12


def test_a_feature_that_is_not_offered_is_refused_by_name(open_executor: OpenExecutor) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"request\.lora_config is not supported") as caught:
        open_executor().enqueue_request(request([3], lora_config=LoraConfig(1)))
    assert caught.value.field == "request.lora_config"


def test_position_ids_may_say_what_is_the_case_anyway_and_nothing_else(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    plain = run(executor, [request([3, 4, 5])])
    for usual in ([0, 1, 2], np.arange(3)):
        assert run(executor, [request([3, 4, 5], position_ids=usual)]) == plain
    with pytest.raises(UnsupportedFeatureError, match=r"position_ids\[1\] is 2; only 1 is supported") as caught:
        executor.enqueue_request(request([3, 4, 5], position_ids=[0, 2, 3]))
    assert caught.value.field == "position_ids"
    with pytest.raises(InvalidRequestError, match="position_ids has 2 entries; the prompt has 3 tokens"):
        executor.enqueue_request(request([3, 4, 5], position_ids=[0, 1]))


def test_a_request_that_can_never_fit_the_pool_is_refused_with_the_numbers(open_executor: OpenExecutor) -> None:
    executor = open_executor(kv_cache_config=KvCacheConfig(max_tokens=40))
    with pytest.raises(InvalidRequestError, match="block"):
        executor.enqueue_request(request([3] * 30, 30))
    assert len(run(executor, [request([3] * 10)])[0]) == 12


def test_a_full_queue_refuses_with_a_typed_error_and_takes_requests_again(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_queue_size=2, max_batch_size=1)
    with executor._loop.batch_manager_lock:
        ids = executor.enqueue_requests([request([3]), request([3])])
        with pytest.raises(QueueFullError):
            executor.enqueue_request(request([3]))
    for each in ids:
        finish(executor, each)
    assert len(run(executor, [request([3])])[0]) == 12


def test_configurations_beyond_the_engine_are_refused_by_name(open_executor: OpenExecutor) -> None:
    for field, value in (("max_batch_size", 17), ("max_num_tokens", 65), ("max_batch_size", 0)):
        with pytest.raises(InvalidRequestError, match=f"{field} is {value}"):
            open_executor(**{field: value})
    with pytest.raises(UnsupportedFeatureError, match="gpu_weights_percent"):
        open_executor(gpu_weights_percent=0.5)
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype"):
        open_executor(kv_cache_config=KvCacheConfig(kv_cache_dtype="int3"))


# -- cancel, deadlines, failures


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("when", ["queued", "at once", "running", "ended"])
def test_cancelling_gives_exactly_one_final_response(open_executor: OpenExecutor, when: str, streaming: bool) -> None:
    executor = open_executor(max_batch_size=1)
    blocker = executor.enqueue_request(request([3] * 20, 200)) if when == "queued" else None
    heard: list[Response] = []
    request_id = executor.enqueue_request(request([4, 5], 200, streaming=streaming), listener=heard.extend)
    if when == "running":
        wait_until(lambda: len(heard) > 2 if streaming else executor._batch_manager.num_running == 1)
    if when == "ended":
        wait_until(lambda: any(each.is_final for each in heard))
    executor.cancel_request(request_id)
    executor.cancel_request(request_id)
    wait_until(lambda: any(each.is_final for each in heard))
    if blocker is not None:
        executor.cancel_request(blocker)
        finish(executor, blocker)
    assert len(run(executor, [request([3])])[0]) == 12
    finals = [each for each in heard if each.is_final]
    assert len(finals) == 1
    assert heard[-1] is finals[0]
    reason = FinishReason.LENGTH if when == "ended" else FinishReason.CANCELLED
    assert finals[0].result.finish_reasons == [reason]
    assert executor.num_unfinished_requests == 0


def test_an_allotted_time_ends_a_request_that_was_never_scheduled(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    blocker = executor.enqueue_request(request([3] * 20, 200))
    queued = executor.enqueue_request(request([4], allotted_time_ms=timedelta(milliseconds=1)))
    final = finish(executor, queued)[-1].result
    assert final.finish_reasons == [FinishReason.TIMED_OUT]
    assert final.output_token_ids == [[]]
    executor.cancel_request(blocker)
    finish(executor, blocker)


@pytest.mark.parametrize("when", ["while it is begun", "while it is computed", "beside it"])
def test_a_failing_step_ends_its_requests_with_an_error_and_the_loop_goes_on(
    open_executor: OpenExecutor, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor()
    expected = run(executor, [request([3, 4, 5])])
    submit = executor._engine.submit

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("device lost")

    def failing_later(inputs: StepInputs) -> Callable[[], None]:
        submit(inputs)()
        return fail

    if when == "beside it":
        monkeypatch.setattr(executor._loop._step._sampler, "prepare", fail)
    else:
        monkeypatch.setattr(executor._engine, "submit", fail if when == "while it is begun" else failing_later)
    with executor._loop.batch_manager_lock:
        ids = executor.enqueue_requests([request(prompt) for prompt in prompts(3)])
    for each in ids:
        response = executor.await_responses(each, WAIT)[-1]
        assert response.has_error()
        assert isinstance(response.error, EngineStepError)
        assert "device lost" in response.error_msg
    assert run(executor, [request([3, 4, 5])]) == expected
    assert executor._batch_manager.num_running == executor._batch_manager.num_waiting == 0


def test_a_plan_that_cannot_be_made_ends_its_requests_and_the_loop_goes_on(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    expected = run(executor, [request([3, 4, 5])])
    blocks = executor._batch_manager._life.blocks.kv
    healthy = blocks.allocate

    def failing(*_: object) -> None:
        blocks.allocate = healthy  # type: ignore[method-assign]
        raise RuntimeError("bookkeeping lost")

    with executor._loop.batch_manager_lock:
        blocks.allocate = failing  # type: ignore[method-assign]
        first = executor.enqueue_request(request([9] * 30))
    response = executor.await_responses(first, WAIT)[-1]
    assert isinstance(response.error, EngineStepError)
    assert run(executor, [request([3, 4, 5])]) == expected


def test_logits_that_are_not_numbers_fail_their_request_only(open_executor: OpenExecutor) -> None:
    from executor import LogitsPostProcessorConfig

    def poison(_id: int, logits: Any, _tokens: Any, _stream: Any, _client: Any = None) -> None:
        logits[:] = float("nan")

    executor = open_executor(logits_post_processor_config=LogitsPostProcessorConfig({"poison": poison}))
    good = [request(prompt) for prompt in prompts(3)]
    expected = run(executor, good)
    with executor._loop.batch_manager_lock:
        ids = executor.enqueue_requests(good)
        bad = executor.enqueue_request(request([3, 4], logits_post_processor_name="poison"))
    assert executor.await_responses(bad, WAIT)[-1].has_error()
    assert [tokens_of(finish(executor, each)) for each in ids] == expected


def test_shutdown_gives_every_live_request_a_final_error(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_batch_size=1)
    heard: list[Response] = []
    ids = [executor.enqueue_request(request([3], 200), listener=heard.extend) for _ in range(3)]
    executor.shutdown()
    assert sorted(each.request_id for each in heard if each.is_final) == ids
    assert all(isinstance(each.error, ExecutorShutDownError) for each in heard if each.has_error())
    assert not executor.can_enqueue_requests()
    with pytest.raises(ExecutorShutDownError):
        executor.enqueue_request(request([3]))


# -- the pool and the table


def test_short_requests_take_at_most_one_block_more_than_their_tokens_need(open_executor: OpenExecutor) -> None:
    executor = open_executor(iteration_table_max_rows=100_000, kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    run(executor, [request(prompt, 9) for prompt in prompts(64)])
    for row in executor.iteration_table():
        assert row.blocks <= -(-row.num_tokens_with_spec // 4) + 1


def test_the_iteration_table_shows_context_and_generation_in_one_iteration(open_executor: OpenExecutor) -> None:
    executor = open_executor(iteration_table_max_rows=1000)
    first = executor.enqueue_request(request([3, 4], 100, streaming=True))
    executor.await_responses(first, WAIT)
    second = executor.enqueue_request(request([5] * 30, 4))
    for each in (first, second):
        finish(executor, each)
    phases: dict[int, set[str]] = {}
    for row in executor.iteration_table():
        phases.setdefault(row.iteration, set()).add(str(row.phase))
    assert {"context", "generation"} in phases.values()


def test_nothing_is_held_when_no_request_is_live(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    run(executor, [request(prompt) for prompt in prompts(20)])
    stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert stats is not None
    assert stats.used_num_blocks == 0
    assert stats.free_num_blocks == stats.max_num_blocks


def test_many_threads_may_enqueue_and_cancel_at_once(open_executor: OpenExecutor) -> None:
    executor = open_executor(max_num_tokens=32)
    finals: list[Response] = []
    lock = threading.Lock()

    def listener(responses: list[Response]) -> None:
        with lock:
            finals.extend(each for each in responses if each.is_final)

    def client(seed: int) -> None:
        source = random.Random(seed)
        for prompt in prompts(10, seed):
            each = executor.enqueue_request(request(prompt, 20, streaming=True), listener=listener)
            if source.random() < 0.5:
                time.sleep(source.random() * 0.02)
                executor.cancel_request(each)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: executor.num_unfinished_requests == 0)
    assert len(finals) == 80
    assert len({each.request_id for each in finals}) == 80


def test_the_configuration_may_take_the_place_of_the_model_type(tiny_engine_dir: Any) -> None:
    with Executor(tiny_engine_dir, ExecutorConfig(max_batch_size=2)) as executor:
        assert executor.config.max_batch_size == 2
