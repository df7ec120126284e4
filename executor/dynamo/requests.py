"""From the request that Dynamo's frontend sends a worker to ours.

The frontend has tokenized the prompt, rendered the chat template, and looks for stop strings itself; what arrives are
token ids and options. Fields are those of Dynamo's `PreprocessedRequest`, lib/llm/src/protocols/common/preprocessor.rs.
Defaults are OpenAI's: a temperature of 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.request import GuidedDecodingParams, GuideType, RequestType
from executor.api.role import InstanceRole
from executor.api.sampling_config import SamplingConfig
from executor.serving.generation_request import GenerationRequest, TokenPrompt

_SEED_RANGE = 2**64

_NOT_OFFERED = {
    "multi_modal_data": "images, audio and video",
    "prompt_embeds": "prompt embeddings",
    "encoder_result": "encoders",
}
"""Fields of the request that change its answer."""

_KNOWN_SAMPLING = frozenset(
    {
        "best_of",
        "frequency_penalty",
        "guided_decoding",
        "include_stop_str_in_output",
        "length_penalty",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "use_beam_search",
    }
)
"""`include_stop_str_in_output` is the frontend's to follow, as is `stop` below."""
_KNOWN_STOPS = frozenset(
    {
        "ignore_eos",
        "max_thinking_tokens",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "stop_token_ids_hidden",
        "stop_token_ids_visible",
    }
)
_REQUEST_TYPES = {
    InstanceRole.CONTEXT: RequestType.REQUEST_TYPE_CONTEXT_ONLY,
    InstanceRole.GENERATION: RequestType.REQUEST_TYPE_GENERATION_ONLY,
    InstanceRole.BOTH: RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
}
_GUIDES = {"json": GuideType.JSON_SCHEMA, "regex": GuideType.REGEX, "grammar": GuideType.EBNF_GRAMMAR}


def read_request(request: Mapping[str, Any], role: InstanceRole = InstanceRole.BOTH) -> GenerationRequest:
    """What Dynamo asks for, as the serving layer takes it.

    Args:
        request: as it came.
        role: of the instance. A context instance is asked for one token of an output whose limit it is not told, so
            it is let believe that there is one more.

    Raises:
        InvalidRequestError, UnsupportedFeatureError: names the field.
    """
    for field, what in _NOT_OFFERED.items():
        if request.get(field):
            raise UnsupportedFeatureError(f"{field} is set; {what} are not offered", field=field)
    sampling = _options(request, "sampling_options", _KNOWN_SAMPLING)
    stops = _options(request, "stop_conditions", _KNOWN_STOPS)
    outputs = _options(request, "output_options", None)
    routing = _options(request, "routing", None)
    _only(sampling, "sampling_options", "n", 1)  # Dynamo's worker ends a request with its first output
    _only(sampling, "sampling_options", "best_of", 1)
    _only(sampling, "sampling_options", "use_beam_search", False)
    _only(sampling, "sampling_options", "length_penalty", 1.0)
    _only(stops, "stop_conditions", "max_thinking_tokens", None)
    log_probs = outputs.get("logprobs")
    seed = sampling.get("seed")
    temperature = sampling.get("temperature")
    top_k = sampling.get("top_k")
    return GenerationRequest(
        TokenPrompt(request["token_ids"]),
        max_tokens=2 if role is InstanceRole.CONTEXT else stops.get("max_tokens"),
        request_type=_REQUEST_TYPES[role],
        sampling_config=SamplingConfig(
            temperature=1.0 if temperature is None else temperature,
            top_p=sampling.get("top_p"),
            top_k=None if top_k == -1 else top_k,  # -1: all, as nobody's default
            min_p=sampling.get("min_p"),
            seed=None if seed is None else seed % _SEED_RANGE,
            min_tokens=stops.get("min_tokens"),
            presence_penalty=sampling.get("presence_penalty"),
            frequency_penalty=sampling.get("frequency_penalty"),
            repetition_penalty=sampling.get("repetition_penalty"),
        ),
        return_log_probs=log_probs is not None,
        num_top_log_probs=log_probs or 0,
        return_prompt_log_probs=outputs.get("prompt_logprobs") is not None,
        stop_token_ids=_stop_token_ids(stops),
        ignore_eos=bool(stops.get("ignore_eos")),
        priority=_priority(routing.get("priority") or 0),
        cache_salt_id=_salt_id(routing.get("cache_salt")),
        guided_decoding_params=_guide(sampling.get("guided_decoding")),
    )


def _options(request: Mapping[str, Any], name: str, known: frozenset[str] | None) -> Mapping[str, Any]:
    options: Mapping[str, Any] = request.get(name) or {}
    for field, value in options.items():
        if known is not None and field not in known and value not in (None, [], {}):
            raise UnsupportedFeatureError(f"{name}.{field} is {value!r}; it is not offered", field=f"{name}.{field}")
    return options


def _only(options: Mapping[str, Any], name: str, field: str, right: Any) -> None:
    value = options.get(field)
    if value is not None and value != right:
        raise UnsupportedFeatureError(
            f"{name}.{field} is {value!r}; only {right!r} is offered", field=f"{name}.{field}"
        )


def _stop_token_ids(stops: Mapping[str, Any]) -> list[int]:
    """Those the client named and those the frontend added, the model's end tokens among them.

    A request that ignores the end token keeps only what the client named.
    """
    fields = ["stop_token_ids", "stop_token_ids_visible"]
    if not stops.get("ignore_eos"):
        fields.append("stop_token_ids_hidden")
    return list(dict.fromkeys(token_id for field in fields for token_id in stops.get(field) or ()))


def _guide(guided: Mapping[str, Any] | None) -> GuidedDecodingParams | None:
    if not guided:
        return None
    given = {field: value for field, value in guided.items() if value is not None}
    for field in ("backend", "whitespace_pattern"):
        given.pop(field, None)  # how a grammar is compiled, not what it says
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(
            f"sampling_options.guided_decoding has {', '.join(sorted(given))}; only one of them can be followed",
            field="sampling_options.guided_decoding",
        )
    field, value = next(iter(given.items()))
    if field == "choice":
        return GuidedDecodingParams(GuideType.REGEX, "(" + "|".join(re.escape(str(choice)) for choice in value) + ")")
    if field == "structural_tag":
        return GuidedDecodingParams(GuideType.STRUCTURAL_TAG, _text(value))
    if field not in _GUIDES:
        name = f"sampling_options.guided_decoding.{field}"
        raise UnsupportedFeatureError(f"{name} is set; it is not offered", field=name)
    return GuidedDecodingParams(_GUIDES[field], _text(value))


def _priority(priority: int) -> float:
    """Dynamo's, any integer around 0, as ours within 0 and 1; a higher one is sooner in both."""
    return 0.5 + 0.5 * priority / (1 + abs(priority))


def _salt_id(salt: str | None) -> int | None:
    """63 bits that stand for a salt."""
    if not salt:
        return None
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "big") >> 1


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
