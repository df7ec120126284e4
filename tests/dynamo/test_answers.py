"""Chunks and what a context hands on, as Dynamo's frontend reads and carries them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.request import FinishReason
from executor import ContextPhaseParams
from executor.api.errors import InvalidRequestError
from executor.api.response import Usage
from executor.dynamo.chunks import context_chunk, delta_chunk, ended_chunk, final_chunk
from executor.dynamo.handover import Ended, from_json, to_json
from executor.serving.events import Delta, Finished, StopMatch, TokenLogProb

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


def finished(reason: FinishReason, params: ContextPhaseParams | None = None) -> Finished:
    return Finished(0, reason, StopMatch(end_id=2), Usage(10, 3, 8), context_phase_params=params)


def test_a_delta_without_log_probabilities_is_its_tokens() -> None:
    assert delta_chunk(Delta(0, "", [4, 5])) == {"index": 0, "token_ids": [4, 5]}


def test_log_probabilities_name_the_chosen_token_first() -> None:
    among = TokenLogProb(-0.5, ((9, -0.1), (4, -0.5)))
    apart = TokenLogProb(-3.0, ((9, -0.1),))
    chunk = delta_chunk(Delta(0, "", [4, 5], [among, apart]))
    assert chunk["log_probs"] == [-0.5, -3.0]
    assert chunk["top_logprobs"] == [
        [{"rank": 2, "token_id": 4, "logprob": -0.5}, {"rank": 1, "token_id": 9, "logprob": -0.1}],
        [{"rank": 0, "token_id": 5, "logprob": -3.0}, {"rank": 1, "token_id": 9, "logprob": -0.1}],
    ]


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.END_ID, "eos"),
        (FinishReason.STOP_WORDS, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.TIMED_OUT, "cancelled"),
        (FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_the_last_chunk_says_why_and_what_was_used(reason: FinishReason, name: str) -> None:
    assert final_chunk(finished(reason)) == {
        "index": 0,
        "token_ids": [],
        "finish_reason": name,
        "completion_usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


def test_a_context_leaves_in_one_chunk_with_its_token_and_what_is_handed_on() -> None:
    params = ContextPhaseParams([7], 3, b"state")
    chunk = context_chunk(Delta(0, "", [7]), finished(FinishReason.LENGTH, params))
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([7], "length")
    assert from_json({"disaggregated_params": chunk["disaggregated_params"]}) == params


def test_a_context_whose_first_token_ends_it_leaves_nothing_to_do() -> None:
    chunk = context_chunk(Delta(0, "", []), finished(FinishReason.END_ID))
    ended = from_json({"disaggregated_params": chunk["disaggregated_params"]})
    assert ended == Ended("eos", [])
    assert ended_chunk(Ended("stop", [5]), 4)["completion_usage"]["total_tokens"] == 5


@given(TOKENS, st.integers(0, 2**63 - 1), st.none() | st.binary(max_size=300), st.none() | TOKENS)
def test_what_is_handed_on_survives_json(
    first: list[int], request_id: int, state: bytes | None, drafts: list[int] | None
) -> None:
    params = ContextPhaseParams(first, request_id, state, drafts)
    assert from_json({"disaggregated_params": json.loads(json.dumps(to_json(params)))}) == params


@pytest.mark.parametrize(
    "prefill_result",
    [
        {},
        {"disaggregated_params": None},
        {"disaggregated_params": {"sample_handle": "x"}},
        {"disaggregated_params": {"ended": "eos"}},
        {"disaggregated_params": {"context_phase_params": {"first_gen_tokens": "x"}}},
        {
            "disaggregated_params": {
                "context_phase_params": {
                    "first_gen_tokens": [1],
                    "req_id": 1,
                    "opaque_state": "no base64!",
                    "draft_tokens": None,
                }
            }
        },
    ],
)
def test_what_somebody_else_hands_on_is_refused_by_name(prefill_result: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="disaggregated_params is not what a context worker of this project"):
        from_json(prefill_result)
