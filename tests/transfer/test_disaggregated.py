"""A request whose context one instance computes and whose generation another: the same answer as from one instance."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor import (
    ContextPhaseParams,
    Executor,
    ExternalDraftTokensConfig,
    FinishReason,
    InstanceRole,
    InvalidRequestError,
    LookaheadDecodingConfig,
    Request,
    Result,
    SamplingConfig,
    UnsupportedFeatureError,
    WrongRoleError,
)
from executor.transfer.context_state import ContextState
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.driving import finish, request, run_one, tokens_of
from tests.transfer.instances import (
    OpenInstance,
    context_only,
    generation_only,
    run_disaggregated,
    wait_until_free,
)

VOCAB = 96


def prompts(seed: int, count: int, longest: int = 90) -> list[list[int]]:
    """Half of them share beginnings."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCAB, longest).tolist()
    made = []
    for index in range(count):
        length = int(random.integers(1, longest))
        own = random.integers(0, VOCAB, length).tolist()
        made.append(shared[: length // 2] + own[length // 2 :] if index % 2 else own)
    return made


SAMPLING = [
    SamplingConfig(),
    SamplingConfig(temperature=0.9, seed=7),
    SamplingConfig(temperature=1.1, seed=8, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingConfig(temperature=1.0, seed=9, top_p=0.9, top_p_decay=0.95, no_repeat_ngram_size=3, min_tokens=4),
]


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no_reuse"])
def test_two_hundred_requests_get_the_tokens_of_one_instance_in_both_role_orders(
    open_instance: OpenInstance, reuse: bool
) -> None:
    one = open_instance(reuse=reuse)
    first, second = open_instance(reuse=reuse), open_instance(reuse=reuse)
    wanted = [
        request(prompt, 2 + index % 9, sampling_config=SAMPLING[index % 4])
        for index, prompt in enumerate(prompts(1, 200))
    ]
    expected = [tokens_of(finish(one, request_id)) for request_id in one.enqueue_requests(wanted)]
    got = []
    for begin in range(0, 200, 25):
        context, generation = (first, second) if begin < 100 else (second, first)
        some = wanted[begin : begin + 25]
        contexts = [
            finish(context, request_id)[0].result
            for request_id in context.enqueue_requests([context_only(each) for each in some])
        ]
        requests = [generation_only(each, params_of(result)) for each, result in zip(some, contexts, strict=True)]
        got += [tokens_of(finish(generation, request_id)) for request_id in generation.enqueue_requests(requests)]
    assert got == expected
    for executor in (first, second):
        stats = executor.get_transfer_stats()
        assert stats is not None
        assert (stats.num_offered, stats.num_sent, stats.num_expired) == (100, 100, 0)
        assert not stats.recomputed
        wait_until_free(executor)


def params_of(result: Result) -> ContextPhaseParams:
    assert result.context_phase_params is not None
    return result.context_phase_params


@pytest.fixture(scope="module")
def larger_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine with blocks of 16 tokens instead of 4."""
    checkpoint = TinyCheckpoint(tiny_config())
    target = select_target("reference")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=16, max_num_tokens=64, max_seq_len=256, tokens_per_block=16
    )
    directory = tmp_path_factory.mktemp("engines") / "larger"
    build_engine(checkpoint, build_config, target, directory, lambda *_: None)
    return directory


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no_reuse"])
def test_blocks_of_other_sizes_are_laid_out_anew(open_instance: OpenInstance, larger_blocks: Path, reuse: bool) -> None:
    """In both directions; with reuse the second prompt of each pair asks only for what is missing."""
    small, large = open_instance(reuse=reuse), open_instance(engine_dir=larger_blocks, reuse=reuse)
    for context, generation in ((small, large), (large, small)):
        for prompt in prompts(3, 12, longest=120):
            wanted = request(prompt, 6)
            assert (
                run_disaggregated(context, generation, wanted).output_token_ids
                == run_one(small, wanted).output_token_ids
            )
    for executor in (small, large):
        stats = executor.get_transfer_stats()
        assert stats is not None
        assert not stats.recomputed
        assert stats.num_sent == 12
        assert stats.num_received > 6  # with reuse the cache may have had all of a prompt
        wait_until_free(executor)


def test_narrower_keys_and_values_can_be_received(open_instance: OpenInstance) -> None:
    context, generation = open_instance(), open_instance(kv_cache_dtype="bfloat16")
    result = run_disaggregated(context, generation, request(list(range(50)), 6))
    assert len(result.output_token_ids[0]) == 6
    stats = generation.get_transfer_stats()
    assert stats is not None
    assert stats.num_received == 1


def test_only_missing_blocks_are_asked_for(open_instance: OpenInstance) -> None:
    context, generation = open_instance(), open_instance()
    shared = list(range(64))
    run_disaggregated(context, generation, request([*shared, 1, 2, 3], 4))
    run_disaggregated(context, generation, request([*shared, 4, 5, 6], 4))
    stats = generation.get_transfer_stats()
    assert stats is not None
    assert stats.num_received_tokens == 67 + 3


@pytest.mark.parametrize(
    "block_ids",
    [(), (5, 4, 3, 2, 1, 0, 7), (0,), (10**6,) * 7],
    ids=["none", "other blocks", "too few", "outside the pool"],
)
def test_blocks_that_a_client_has_changed_are_never_used(
    open_instance: OpenInstance, block_ids: tuple[int, ...]
) -> None:
    """The state passes through the client's hands. A receiver that knows the peer's memory begins with what it says."""
    one, context, generation = open_instance(), open_instance(), open_instance()
    wanted = request(prompts(8, 1)[0] * 3, 6)
    wanted.input_token_ids = wanted.input_token_ids[: 7 * one.spec.tokens_per_block - 1]
    expected = run_one(one, wanted).output_token_ids
    run_disaggregated(context, generation, request([1, 2, 3, 4, 5], 3))
    params = run_one(context, context_only(wanted)).context_phase_params
    assert params is not None
    assert params.opaque_state is not None
    state = ContextState.from_bytes(params.opaque_state)
    assert len(state.block_ids) == 7
    params.opaque_state = replace(state, block_ids=block_ids).to_bytes()
    assert run_one(generation, generation_only(wanted, params)).output_token_ids == expected
    stats = generation.get_transfer_stats()
    assert stats is not None
    assert stats.num_received == (2 if len(block_ids) < 7 else 1)


def test_blocks_whose_lease_has_ended_are_never_used(open_instance: OpenInstance) -> None:
    """A receiver that knows the peer's memory begins to read them, although others have computed there since."""
    one, generation = open_instance(), open_instance()
    context = open_instance(timeout_ms=1000, reuse=False)
    wanted = request(prompts(8, 1)[0] * 3, 6)
    expected = run_one(one, wanted).output_token_ids
    run_disaggregated(context, generation, request([1, 2, 3, 4, 5], 3))
    params = run_one(context, context_only(wanted)).context_phase_params
    assert params is not None
    wait_until_free(context)
    for other in prompts(9, 4):
        run_one(context, request(other * 3, 2))
    assert run_one(generation, generation_only(wanted, params)).output_token_ids == expected
    stats = generation.get_transfer_stats()
    assert stats is not None
    assert stats.num_received == 1
    assert stats.recomputed == {"lease ended": 1}
    wait_until_free(generation)


def test_what_is_received_is_told_and_timed(open_instance: OpenInstance) -> None:
    context, generation = open_instance(), open_instance()
    result = run_disaggregated(context, generation, request(list(range(20)), 4, output={"return_perf_metrics": True}))
    assert result.request_perf_metrics is not None
    timing = result.request_perf_metrics.timing_metrics
    assert timing.arrival_time < timing.kv_cache_transfer_start < timing.kv_cache_transfer_end < timing.last_token_time
    assert timing.kv_cache_size == 5 * generation.spec.kv_bytes_per_block


def test_drafts_travel_along(open_instance: OpenInstance) -> None:
    """The context's own draft is the rest of what the client proposed, if it began right."""
    context, generation = open_instance(), open_instance()
    wanted = request(list(range(30)), 8)
    expected = run_one(context, wanted).output_token_ids[0]
    drafted = replace(wanted, external_draft_tokens_config=ExternalDraftTokensConfig(expected[:5]))
    params = params_of(run_one(context, context_only(drafted)))
    assert params.draft_tokens == expected[1:5]
    result = run_one(generation, generation_only(wanted, params))
    assert result.output_token_ids[0] == expected
    assert result.decoding_iter < 8


def test_lookahead_drafts_for_whoever_goes_on(open_instance: OpenInstance) -> None:
    context, generation = open_instance(), open_instance()
    wanted = request([5, 6, 7, 8] * 10, 8, lookahead_config=LookaheadDecodingConfig(4, 3, 4))
    expected = run_one(context, wanted).output_token_ids[0]
    params = params_of(run_one(context, context_only(wanted)))
    assert run_one(generation, generation_only(wanted, params)).output_token_ids[0] == expected


def test_a_request_that_ends_with_its_first_token_goes_nowhere(open_instance: OpenInstance) -> None:
    context = open_instance()
    wanted = request(list(range(30)), 8)
    first = run_one(context, wanted).output_token_ids[0][0]
    ended = run_one(context, context_only(replace(wanted, end_id=first)))
    assert ended.finish_reasons == [FinishReason.END_ID]
    assert ended.context_phase_params is None
    assert run_one(context, context_only(replace(wanted, max_tokens=1))).context_phase_params is None
    wait_until_free(context)


def test_streaming_begins_with_the_first_token(open_instance: OpenInstance) -> None:
    context, generation = open_instance(), open_instance()
    wanted = replace(request(list(range(30)), 8), streaming=True)
    expected = tokens_of(finish(context, context.enqueue_request(wanted)))
    params = params_of(run_one(context, context_only(wanted)))
    assert tokens_of(finish(generation, generation.enqueue_request(generation_only(wanted, params)))) == expected


def refused(executor: Executor, wanted: Request, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        executor.enqueue_request(wanted)


def test_what_does_not_fit_together_is_refused_by_name(
    open_instance: OpenInstance, open_executor: Callable[..., Executor]
) -> None:
    context, generation = open_instance(), open_instance()
    wanted = request(list(range(30)), 8)
    params = params_of(run_one(context, context_only(wanted)))
    state = params.opaque_state
    assert state is not None
    refused(generation, generation_only(request(list(range(31)), 8), params), InvalidRequestError, "another prompt")
    refused(
        generation, generation_only(replace(wanted, cache_salt_id=1), params), InvalidRequestError, "another prompt"
    )
    refused(generation, generation_only(replace(wanted, max_tokens=1), params), InvalidRequestError, "at least 2")
    refused(generation, replace(wanted, context_phase_params=params), InvalidRequestError, "others do not")
    refused(generation, context_only(replace(wanted, num_return_sequences=2)), InvalidRequestError, "one sequence")
    for damaged, why in (
        (b"", "is not what a context-only request returned"),
        (b"x" * 70_000, "at most 65536 are taken"),
        (state[:-1] + bytes([state[-1] ^ 1]), "was damaged"),
        (state[:4] + b"\x09\x00" + state[6:], "has version 9"),
        (None, "is not set"),
    ):
        refused(generation, generation_only(wanted, replace(params, opaque_state=damaged)), InvalidRequestError, why)
    refused(open_executor(), context_only(wanted), UnsupportedFeatureError, "without a cache_transceiver_config")


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "float8_e4m3fn"])
def test_keys_and_values_in_a_type_that_cannot_be_exchanged_are_refused_when_opened(
    open_instance: OpenInstance, kv_cache_dtype: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"keys and values in {kv_cache_dtype} cannot be exchanged"):
        open_instance(kv_cache_dtype=kv_cache_dtype)


def test_another_models_context_is_refused(open_instance: OpenInstance, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config(), seed=7)
    target = select_target("reference")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=16, max_num_tokens=64, max_seq_len=256, tokens_per_block=4
    )
    build_engine(checkpoint, build_config, target, tmp_path / "other", lambda *_: None)
    context, generation = open_instance(), open_instance(engine_dir=tmp_path / "other")
    wanted = request(list(range(30)), 8)
    params = params_of(run_one(context, context_only(wanted)))
    refused(generation, generation_only(wanted, params), InvalidRequestError, "same network with different weights")


def test_a_role_changes_while_the_instance_runs(open_instance: OpenInstance) -> None:
    """What was taken before goes on: here a context that was leased before its instance became a generation one."""
    executor, other = open_instance(role="context"), open_instance()
    wanted = request(list(range(30)), 8)
    refused(executor, wanted, WrongRoleError, "role is context, which takes REQUEST_TYPE_CONTEXT_ONLY")
    params = params_of(run_one(executor, context_only(wanted)))
    executor.change_role(InstanceRole.GENERATION)
    refused(executor, context_only(wanted), WrongRoleError, "role is generation")
    expected = run_one(other, wanted).output_token_ids
    assert run_one(other, generation_only(wanted, params)).output_token_ids == expected
    back = params_of(run_one(other, context_only(wanted)))
    assert run_one(executor, generation_only(wanted, back)).output_token_ids == expected


def test_a_receiver_without_room_waits_and_keeps_the_context_leased(open_instance: OpenInstance) -> None:
    """Its heartbeats renew the lease for longer than it would last."""
    context = open_instance(timeout_ms=300)
    generation = open_instance(timeout_ms=300, max_tokens=128)
    wanted = request(list(range(60)), 8)
    expected = run_one(context, wanted).output_token_ids
    busy = generation.enqueue_request(request(list(range(20)), 100))
    generation.pause()
    params = params_of(run_one(context, context_only(wanted)))
    waiting = generation.enqueue_request(generation_only(wanted, params))
    time.sleep(0.8)
    generation.resume()
    assert finish(generation, waiting)[-1].result.output_token_ids == expected
    finish(generation, busy)
    stats = generation.get_transfer_stats()
    assert stats is not None
    assert not stats.recomputed
