"""What completions and chat completions have in common: sampling, limits, formats.

Beside OpenAI's parameters the usual extensions are read: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `ignore_eos`, `include_stop_str_in_output`, `priority`, `allotted_time_ms`, `cache_salt_id`,
`stream_options.continuous_usage_stats`.
Defaults are OpenAI's: a temperature of 1, where gRPC's is greedy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from executor.api.errors import InvalidRequestError
from executor.api.request import GuidedDecodingParams, GuideType
from executor.api.sampling_config import SamplingConfig
from executor.serving.generation_request import GenerationRequest, Prompt
from executor.serving.http.body import Body, choice_of

_SEED_RANGE = 2**64


class UsageReports(Enum):
    """Which chunks of a stream carry token counts."""

    NONE = "none"
    LAST_CHUNK = "last_chunk"
    EVERY_CHUNK = "every_chunk"
    """As far as they go: an extension that benchmark clients ask for."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything of a request but its prompts and how its answer is written."""

    sampling_config: SamplingConfig
    stop_strings: list[str]
    stop_token_ids: list[int]
    include_stop: bool
    ignore_eos: bool
    num_return_sequences: int
    priority: float
    tenant: str
    cache_salt_id: int | None
    allotted_time_ms: int | None
    guided_decoding_params: GuidedDecodingParams | None
    streaming: bool
    usage_reports: UsageReports

    def requests(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None,
        num_top_log_probs: int | None,
        request_id: str | None,
        trace_parent: str | None,
    ) -> list[GenerationRequest]:
        """A request for each prompt. `num_top_log_probs` of `None` asks for no log probabilities."""
        return [
            GenerationRequest(
                prompt,
                max_tokens=max_tokens,
                streaming=self.streaming,
                sampling_config=self.sampling_config,
                return_log_probs=num_top_log_probs is not None,
                num_top_log_probs=num_top_log_probs or 0,
                stop_strings=self.stop_strings,
                stop_token_ids=self.stop_token_ids,
                include_stop=self.include_stop,
                ignore_eos=self.ignore_eos,
                num_return_sequences=self.num_return_sequences,
                priority=self.priority,
                tenant=self.tenant,
                cache_salt_id=self.cache_salt_id,
                allotted_time_ms=self.allotted_time_ms,
                guided_decoding_params=self.guided_decoding_params,
                request_id=request_id if request_id is None or len(prompts) == 1 else f"{request_id}-{index}",
                trace_parent=trace_parent,
            )
            for index, prompt in enumerate(prompts)
        ]


def take_parameters(body: Body) -> Parameters:
    """Read the common parameters.

    Raises:
        InvalidRequestError, UnsupportedFeatureError: by the field's name.
    """
    body.ignore("metadata", "prompt_cache_key", "safety_identifier")
    body.only("logit_bias", {})
    body.only("store", False)
    body.only("service_tier", "auto", "default")
    streaming = body.flag("stream")
    options = body.nested("stream_options")
    usage_reports = UsageReports.NONE
    if options is not None:
        if not streaming:
            raise InvalidRequestError("stream_options needs stream", field="stream_options")
        include_usage, continuously = options.flag("include_usage"), options.flag("continuous_usage_stats")
        if include_usage:
            usage_reports = UsageReports.EVERY_CHUNK if continuously else UsageReports.LAST_CHUNK
        elif continuously:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats needs include_usage",
                field="stream_options.continuous_usage_stats",
            )
        options.only("include_obfuscation", False)
        options.finish()
    temperature = body.number("temperature")
    seed = body.integer("seed")
    priority = body.number("priority")
    return Parameters(
        sampling_config=SamplingConfig(
            temperature=1.0 if temperature is None else temperature,
            top_p=body.number("top_p"),
            top_k=body.integer("top_k"),
            min_p=body.number("min_p"),
            seed=None if seed is None else seed % _SEED_RANGE,
            min_tokens=body.integer("min_tokens", least=0),
            frequency_penalty=body.number("frequency_penalty"),
            presence_penalty=body.number("presence_penalty"),
            repetition_penalty=body.number("repetition_penalty"),
        ),
        stop_strings=body.texts("stop"),
        stop_token_ids=body.integers("stop_token_ids"),
        include_stop=body.flag("include_stop_str_in_output"),
        ignore_eos=body.flag("ignore_eos"),
        num_return_sequences=body.integer("n", least=1) or 1,
        priority=0.5 if priority is None else priority,
        tenant=body.text("user") or "",
        cache_salt_id=body.integer("cache_salt_id", least=0),
        allotted_time_ms=body.integer("allotted_time_ms", least=0),
        guided_decoding_params=_take_response_format(body),
        streaming=streaming,
        usage_reports=usage_reports,
    )


def _take_response_format(body: Body) -> GuidedDecodingParams | None:
    response_format = body.nested("response_format")
    if response_format is None:
        return None
    kind = choice_of(response_format, "type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise InvalidRequestError("response_format.type is not set", field="response_format.type")
    guide = None
    if kind == "json_object":
        guide = GuidedDecodingParams(GuideType.JSON)
    elif kind == "json_schema":
        guide = GuidedDecodingParams(GuideType.JSON_SCHEMA, _take_schema(response_format))
    response_format.finish()
    return guide


def _take_schema(response_format: Body) -> str:
    wrapper = response_format.nested("json_schema")
    if wrapper is None:
        raise InvalidRequestError("response_format.json_schema is not set", field="response_format.json_schema")
    wrapper.ignore("name", "description", "strict")
    schema: Any = wrapper.take("schema")
    if not isinstance(schema, dict):
        raise wrapper.wrong("schema", schema, "a JSON schema")
    wrapper.finish()
    return json.dumps(schema)
