"""Logits post-processors, called as `tensorrt_llm.bindings.executor` calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executor.sampling import LogitsProcessorError, NoTokenLeftError, SampledRows, Sampler, SamplingSpec

VOCAB = 11


def test_a_processor_is_given_what_upstream_gives_and_changes_the_logits_in_place() -> None:
    calls: list[tuple[Any, ...]] = []

    def processor(
        request_id: int, logits: Any, token_ids: list[list[int]], stream: object, client_id: int | None
    ) -> None:
        calls.append((request_id, tuple(logits.shape), token_ids, stream, client_id))
        logits[:] = float("-inf")
        logits[..., 7] = 0

    sampler = Sampler(VOCAB)
    sampler.open(3, SamplingSpec(prompt_token_ids=[1, 2], logits_processors=[processor], client_id=99))
    [result] = sampler.sample(np.zeros((1, VOCAB), np.float32), [SampledRows(3, [1, 2, 5], [], 0, 1)])
    assert result.token_ids == [7]
    assert calls == [(3, (1, 1, VOCAB), [[1, 2, 5]], None, 99)]


def test_a_processor_gets_a_torch_tensor_where_torch_is_installed() -> None:
    torch = pytest.importorskip("torch")
    seen: list[Any] = []
    sampler = Sampler(VOCAB)
    sampler.open(0, SamplingSpec(logits_processors=[lambda *arguments: seen.append(arguments[1])]))
    sampler.sample(np.zeros((1, VOCAB), np.float32), [SampledRows(0, [1], [], 0, 1)])
    assert isinstance(seen[0], torch.Tensor)


def test_a_processor_may_leave_out_the_client_id() -> None:
    def processor(_request_id: int, logits: Any, _token_ids: list[list[int]], _stream: object) -> None:
        logits[..., 4] = 100

    sampler = Sampler(VOCAB)
    sampler.open(0, SamplingSpec(logits_processors=[processor]))
    [result] = sampler.sample(np.zeros((1, VOCAB), np.float32), [SampledRows(0, [1], [], 0, 1)])
    assert result.token_ids == [4]


def test_the_rows_after_drafts_show_the_drafts_to_the_processor() -> None:
    seen: list[list[int]] = []

    def processor(
        _request_id: int, logits: Any, token_ids: list[list[int]], _stream: object, _client_id: object
    ) -> None:
        seen.append(token_ids[0])
        logits[..., len(token_ids[0])] = 100

    sampler = Sampler(VOCAB)
    sampler.open(0, SamplingSpec(logits_processors=[processor]))
    [result] = sampler.sample(np.zeros((3, VOCAB), np.float32), [SampledRows(0, [0], [1, 2], 0, 3)])
    assert seen == [[0], [0, 1], [0, 1, 2]]
    assert result.token_ids == [1, 2, 3]


def test_a_batched_processor_is_called_once_for_all_requests_that_name_it() -> None:
    calls: list[tuple[Any, ...]] = []

    def processor(
        request_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream: object,
        clients: list[int | None],
    ) -> None:
        calls.append((request_ids, token_ids, stream, clients))
        for row, request_id in zip(logits, request_ids, strict=True):
            row[..., request_id] = 100

    sampler = Sampler(VOCAB)
    for request_id in (2, 5, 6):
        batched = None if request_id == 5 else processor
        sampler.open(request_id, SamplingSpec(batched_logits_processor=batched, client_id=request_id * 10))
    rows = [SampledRows(request_id, [request_id], [], row, 1) for row, request_id in enumerate((2, 5, 6))]
    results = sampler.sample(np.zeros((3, VOCAB), np.float32), rows)
    assert [result.token_ids for result in results] == [[2], [0], [6]]
    assert calls == [([2, 6], [[[2]], [[6]]], None, [20, 60])]


def test_a_processor_that_raises_ends_only_its_own_request() -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    sampler = Sampler(VOCAB)
    sampler.open(0, SamplingSpec(logits_processors=[broken]))
    sampler.open(1, SamplingSpec())
    sampler.open(2, SamplingSpec(batched_logits_processor=broken))
    rows = [SampledRows(request_id, [1], [], request_id, 1) for request_id in range(3)]
    logits = np.eye(3, VOCAB, dtype=np.float32)
    results = sampler.sample(logits, rows)
    assert isinstance(results[0].error, LogitsProcessorError)
    assert results[0].error.message == "the logits post-processor raised ZeroDivisionError: oops"
    assert (results[1].token_ids, results[1].error) == ([1], None)
    assert isinstance(results[2].error, LogitsProcessorError)
    assert results[0].token_ids == results[2].token_ids == []


def test_a_processor_that_excludes_everything_leaves_no_token() -> None:
    def processor(_request_id: int, logits: Any, *_: object) -> None:
        logits[:] = float("-inf")

    sampler = Sampler(VOCAB)
    sampler.open(0, SamplingSpec(logits_processors=[processor]))
    [result] = sampler.sample(np.zeros((1, VOCAB), np.float32), [SampledRows(0, [1], [], 0, 1)])
    assert isinstance(result.error, NoTokenLeftError)


def test_log_probs_and_generation_logits_are_those_before_the_processor() -> None:
    def processor(_request_id: int, logits: Any, *_: object) -> None:
        logits += 5
        logits[..., 3] = 1000

    sampler = Sampler(VOCAB)
    spec = SamplingSpec(logits_processors=[processor], return_log_probs=True, return_generation_logits=True)
    sampler.open(0, spec)
    [result] = sampler.sample(np.zeros((1, VOCAB), np.float32), [SampledRows(0, [1], [], 0, 1)])
    assert result.token_ids == [3]
    assert result.log_probs == pytest.approx([-np.log(VOCAB)])
    assert result.generation_logits is not None
    assert np.array_equal(result.generation_logits, np.zeros((1, VOCAB)))
