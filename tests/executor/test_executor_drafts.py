"""Drafts that the client brings: verified at once, never seen in greedy outputs."""

from __future__ import annotations

from typing import Any

import pytest

from executor import (
    ExternalDraftTokensConfig,
    InvalidRequestError,
    KvCacheConfig,
    LookaheadDecodingConfig,
    SamplingConfig,
    kv_cache,
)
from executor import UnsupportedFeatureError as Unsupported
from tests.executor.driving import OpenExecutor, request, run, run_one

METRICS = {"return_perf_metrics": True}


def test_drafts_are_verified_in_the_step_that_ends_the_context(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    plain = run_one(executor, request([3, 4, 5])).output_token_ids[0]
    wrong = [*plain[:2], (plain[2] + 1) % 128, *plain[3:6]]
    for drafts, accepted in ((plain[:5], 5), (wrong, 2), ([(plain[0] + 1) % 128], 0)):
        executor.get_latest_iteration_stats()
        config = ExternalDraftTokensConfig(drafts)
        result = run_one(executor, request([3, 4, 5], output=METRICS, external_draft_tokens_config=config))
        assert result.output_token_ids[0] == plain
        assert result.request_perf_metrics is not None
        speculation = result.request_perf_metrics.speculative_decoding
        assert speculation.total_draft_tokens == len(drafts)
        assert speculation.total_accepted_draft_tokens == accepted
        assert speculation.acceptance_rate == pytest.approx(accepted / len(drafts))
        first, *rest = executor.get_latest_iteration_stats()
        assert first.specdec_stats is not None
        assert first.specdec_stats.num_draft_tokens == len(drafts)
        assert first.specdec_stats.num_accepted_tokens == accepted
        assert first.specdec_stats.acceptance_length == 1 + accepted
        assert len(rest) == 12 - 1 - accepted
        assert all(each.specdec_stats is None for each in rest)


def test_drafts_fit_chunked_contexts_cached_prefixes_several_sequences_and_lookahead(
    open_executor: OpenExecutor,
) -> None:
    executor = open_executor(max_num_tokens=8)
    prompt = [5, 6, 7, 8] * 6
    plain = run_one(executor, request(prompt, 30)).output_token_ids[0]
    for fields in ({}, {"lookahead_config": LookaheadDecodingConfig()}, {"num_return_sequences": 2}):
        config = ExternalDraftTokensConfig([*plain[:3], 1, 2])
        wanted: Any = request(prompt, 30, external_draft_tokens_config=config, **fields)
        for response in run(executor, wanted)[0]:
            assert response.result.output_token_ids[0] == plain


def test_a_seed_draws_the_same_tokens_with_and_without_drafts(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    sampling = SamplingConfig(temperature=1.2, top_k=40, seed=9)
    plain = run_one(executor, request([3, 4], 20, sampling_config=sampling)).output_token_ids
    config = ExternalDraftTokensConfig(plain[0][:4])
    assert (
        run_one(
            executor, request([3, 4], 20, sampling_config=sampling, external_draft_tokens_config=config)
        ).output_token_ids
        == plain
    )


def test_more_drafts_than_the_request_has_room_for_are_cut(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    plain = run_one(executor, request([3, 4, 5])).output_token_ids[0]
    config = ExternalDraftTokensConfig(plain)
    result = run_one(executor, request([3, 4, 5], 3, output=METRICS, external_draft_tokens_config=config))
    assert result.output_token_ids[0] == plain[:3]
    assert result.request_perf_metrics is not None
    assert result.request_perf_metrics.speculative_decoding.total_draft_tokens == 2


def test_bad_drafts_are_refused_by_name(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    for tokens, message in (([], "is empty"), ([3, 128], r"tokens\[1\] is 128"), (["a"], "list of integers")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            executor.enqueue_request(request([3], external_draft_tokens_config=ExternalDraftTokensConfig(tokens)))
        assert caught.value.field == "external_draft_tokens_config.tokens"
    for fields in ({"logits": [[0.0]]}, {"acceptance_threshold": 0.5}, {"fast_logits": True}):
        refused = request([3], external_draft_tokens_config=ExternalDraftTokensConfig([4], **fields))
        with pytest.raises(Unsupported, match=next(iter(fields))):
            executor.enqueue_request(refused)
    nothing_asked = request([3], external_draft_tokens_config=ExternalDraftTokensConfig([4], fast_logits=False))
    assert len(run_one(executor, nothing_asked).output_token_ids[0]) == 12


def test_a_lookahead_configuration_out_of_range_is_refused_at_the_edge(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    with pytest.raises(InvalidRequestError, match="max_window_size is 0"):
        executor.enqueue_request(request([3], lookahead_config=LookaheadDecodingConfig(0, 3, 4)))
    assert len(run_one(executor, request([3])).output_token_ids[0]) == 12


def test_rejected_drafts_are_never_found_in_the_cache(open_executor: OpenExecutor) -> None:
    """Wrong drafts fill whole blocks, whose keys and values are computed; none of them may be stored for reuse."""
    executor = open_executor(kv_cache_config=KvCacheConfig(event_buffer_max_size=1000))
    manager = executor.get_kv_cache_event_manager()
    assert manager is not None
    prompt = [3, 4, 5, 6, 7, 8]
    plain = run_one(executor, request(prompt, 16)).output_token_ids[0]
    for num_right in (0, 1, 5):
        wrong = [(token + 1) % 128 for token in plain[num_right : num_right + 10]]
        config = ExternalDraftTokensConfig([*plain[:num_right], *wrong])
        fields: Any = {"external_draft_tokens_config": config, "cache_salt_id": 1 + num_right}
        assert run_one(executor, request(prompt, 16, **fields)).output_token_ids[0] == plain
    stored = [
        [token.token_id for token in block.tokens]
        for event in manager.get_latest_events()
        if isinstance(event.data, kv_cache.KVCacheStoredData)
        for block in event.data.blocks
    ]
    text = [*prompt, *plain]
    assert len(stored) >= 4 * (len(text) // 4 - 1)
    for block in stored:
        assert any(block == text[begin : begin + len(block)] for begin in range(0, len(text), 4))
