"""What Dynamo's frontend asks, as our serving layer takes it. Nothing of Dynamo is needed here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import GuidedDecodingParams, InstanceRole, RequestType
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.dynamo.requests import read_request
from executor.serving.generation_request import TokenPrompt

AS_SENT: dict[str, Any] = {
    "model": "m",
    "token_ids": [5, 6, 7],
    "stop_conditions": {
        "max_tokens": 4,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [2],
        "min_tokens": None,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "temperature": 0.0,
        "top_p": None,
        "top_k": -1,
        "min_p": None,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": 7,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "output_options": {
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": None,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [2],
    "mdc_sum": "c06e1be5",
    "annotations": [],
    "routing": {"dp_rank": 0},
    "router_config_override": None,
}
"""A request of the frontend of Dynamo 1.6.1, as it reached a worker."""


def sent(**options: Any) -> dict[str, Any]:
    """The same with other values, each in the group that has its field; `_` parts the two names."""
    request = {**AS_SENT}
    for name, value in options.items():
        group, _, field = name.partition("__")
        request[group] = {**request[group], field: value} if field else value
    return request


def test_a_request_as_the_frontend_sends_it_is_taken_over() -> None:
    request = read_request(AS_SENT)
    assert request.prompt == TokenPrompt([5, 6, 7])
    assert request.max_tokens == 4
    assert request.sampling_config.is_greedy
    assert request.sampling_config.seed == 7
    assert request.sampling_config.top_k is None
    assert request.stop_token_ids == [2]
    assert request.request_type is RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    assert (request.priority, request.cache_salt_id) == (0.5, None)
    request.validate()


def test_without_a_temperature_it_is_that_of_openai() -> None:
    assert read_request(sent(sampling_options__temperature=None)).sampling_config.temperature == 1.0


def test_who_ignores_the_end_token_is_stopped_by_own_tokens_only() -> None:
    request = read_request(sent(stop_conditions__ignore_eos=True, stop_conditions__stop_token_ids=[9]))
    assert request.ignore_eos
    assert request.stop_token_ids == [9]


def test_log_probabilities_are_asked_for_with_their_number() -> None:
    request = read_request(sent(output_options__logprobs=3, output_options__prompt_logprobs=0))
    assert (request.return_log_probs, request.num_top_log_probs, request.return_prompt_log_probs) == (True, 3, True)


@pytest.mark.parametrize(
    ("guided", "kind", "guide"),
    [
        ({"json": {"type": "integer"}}, GuidedDecodingParams.GuideType.JSON_SCHEMA, '{"type": "integer"}'),
        ({"regex": "a+", "backend": "any"}, GuidedDecodingParams.GuideType.REGEX, "a+"),
        ({"choice": ["yes?", "no"]}, GuidedDecodingParams.GuideType.REGEX, r"(yes\?|no)"),
        ({"grammar": "root ::= x"}, GuidedDecodingParams.GuideType.EBNF_GRAMMAR, "root ::= x"),
        ({"structural_tag": "{}"}, GuidedDecodingParams.GuideType.STRUCTURAL_TAG, "{}"),
    ],
)
def test_grammars_become_guides(guided: dict[str, Any], kind: GuidedDecodingParams.GuideType, guide: str) -> None:
    params = read_request(sent(sampling_options__guided_decoding=guided)).guided_decoding_params
    assert params == GuidedDecodingParams(kind, guide)


@pytest.mark.parametrize("guided", [{}, {"json": None, "regex": None}, {"backend": "any"}])
def test_an_empty_grammar_is_none(guided: dict[str, Any]) -> None:
    assert read_request(sent(sampling_options__guided_decoding=guided)).guided_decoding_params is None


def test_two_grammars_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="guided_decoding has json, regex; only one of them"):
        read_request(sent(sampling_options__guided_decoding={"json": {}, "regex": "a"}))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sampling_options__n": 2}, "sampling_options.n is 2; only 1 is offered"),
        ({"sampling_options__use_beam_search": True}, "sampling_options.use_beam_search is True"),
        ({"sampling_options__logit_bias": {"3": 1.0}}, "sampling_options.logit_bias is {'3': 1.0}; it is not offered"),
        ({"stop_conditions__max_thinking_tokens": 5}, "stop_conditions.max_thinking_tokens is 5; only None"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "multi_modal_data is set; images, audio and video"),
        ({"sampling_options__guided_decoding": {"lark": "x"}}, "guided_decoding.lark is set; it is not offered"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=complaint.replace("{", r"\{")):
        read_request(sent(**options))


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_a_higher_priority_stays_higher_and_within_bounds(first: int, second: int) -> None:
    priorities = [read_request(sent(routing__priority=value)).priority for value in (first, second)]
    assert all(0 <= priority <= 1 for priority in priorities)
    assert (first < second) == (priorities[0] < priorities[1])


def test_equal_salts_share_and_others_do_not() -> None:
    ids = [read_request(sent(routing__cache_salt=salt)).cache_salt_id for salt in ("a", "a", "b", "")]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] is None
    assert all(salt_id is None or 0 <= salt_id < 2**63 for salt_id in ids)


def test_a_context_instance_is_asked_for_a_context_that_goes_on() -> None:
    request = read_request(sent(stop_conditions__max_tokens=1), InstanceRole.CONTEXT)
    assert request.request_type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
    assert request.max_tokens == 2
    generation = read_request(AS_SENT, InstanceRole.GENERATION)
    assert (generation.request_type, generation.max_tokens) == (RequestType.REQUEST_TYPE_GENERATION_ONLY, 4)
