"""From the tensors of a row to a request of the Executor. Names are those of TensorRT-LLM's Triton backend.

Every tensor of that backend is known here: it sets something, or using it is an error that names it. What a value means
is the Executor's to check; its errors are told with the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from batch_manager.kv import InvalidKvCacheConfigError
from executor.api.decoding import ExternalDraftTokensConfig, LookaheadDecodingConfig
from executor.api.errors import InvalidRequestError, RequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingParams, GuideType
from executor.api.kv_cache_config import KvCacheRetentionConfig
from executor.api.request import OutputConfig, Request, RequestType
from executor.api.sampling_config import SamplingConfig
from executor.triton.context_phase import from_tensor
from executor.triton.priority import PriorityLevels

_SAMPLING: Mapping[str, str] = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "runtime_top_p_min": "top_p_min",
    "runtime_top_p_decay": "top_p_decay",
    "runtime_top_p_reset_ids": "top_p_reset_ids",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_length": "min_tokens",
    "min_tokens": "min_tokens",
    "random_seed": "seed",
    "seed": "seed",
}
"""Tensor to field of `SamplingConfig`; those with two spellings had both in the course of time."""

_ENCODER = "only decoder-only text models are offered"
_PROMPT_TUNING = "prompt tuning is not offered"
_LORA = "LoRA adapters are not offered yet"
_DRAFT_LOGITS = "drafts are verified by matching tokens, not by their logits"
_BEAM = "it concerns beam search, which is not offered"

_REFUSED: Mapping[str, str] = {
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "decoder_input_ids": _ENCODER,
    "decoder_input_lengths": _ENCODER,
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "mrope_rotary_cos_sin": _ENCODER,
    "mrope_position_deltas": _ENCODER,
    "prompt_embedding_table": _PROMPT_TUNING,
    "prompt_vocab_size": _PROMPT_TUNING,
    "prompt_table_extra_ids": _PROMPT_TUNING,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "draft_logits": _DRAFT_LOGITS,
    "draft_acceptance_threshold": _DRAFT_LOGITS,
}
_WITHOUT_EFFECT: Mapping[str, tuple[float, ...]] = {
    "len_penalty": (0.0, 1.0),
    "early_stopping": (0, 1),
    "beam_search_diversity_rate": (0.0,),
}
"""Values that clients send though they search with one beam; upstream's defaults."""

_GUIDE_TYPES: Mapping[str, GuideType] = {
    "json": GuideType.JSON,
    "json_schema": GuideType.JSON_SCHEMA,
    "regex": GuideType.REGEX,
    "ebnf_grammar": GuideType.EBNF_GRAMMAR,
    "structural_tag": GuideType.STRUCTURAL_TAG,
}
_TENSOR_OF_FIELD: Mapping[str, str] = {
    "max_tokens": "request_output_len",
    "input_token_ids": "input_ids",
    "stop_words": "stop_words_list",
    "bad_words": "bad_words_list",
    "guided_decoding_params": "guided_decoding_guide_type",
    "allotted_time_ms": "timeout",
    **{f"sampling_config.{field}": tensor for tensor, field in reversed(list(_SAMPLING.items()))},
}


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What a row asks for."""

    request: Request
    return_num_input_tokens: bool
    return_num_output_tokens: bool


class RowReader:
    """Makes requests of rows, for one model."""

    def __init__(
        self, vocab_size: int, *, decoupled: bool, exclude_input_in_output: bool, priorities: PriorityLevels
    ) -> None:
        self._vocab_size = vocab_size
        self._decoupled = decoupled
        self._exclude_input = exclude_input_in_output
        self._priorities = priorities

    def request(self, tensors: dict[str, Any], timeout_us: int, parameters: Mapping[str, Any]) -> RowRequest:
        """The request of one row.

        Args:
            tensors: numbers, lists of texts and arrays, by name; is emptied.
            timeout_us: Triton's own field, microseconds; 0: none.
            parameters: Triton's request parameters.

        Raises:
            RequestError: names the tensor or parameter that is wrong, unknown or not offered.
        """
        try:
            return self._request(_Tensors(tensors), timeout_us, parameters)
        except InvalidKvCacheConfigError as error:
            raise InvalidRequestError(f"retention: {error}", field="retention") from None

    def _request(self, tensors: _Tensors, timeout_us: int, parameters: Mapping[str, Any]) -> RowRequest:
        _refuse(tensors)
        tensors.flag("stop")
        streaming = tensors.flag("streaming")
        if streaming and not self._decoupled:
            raise InvalidRequestError(
                "streaming is set, but the model is not decoupled; set model_transaction_policy in its config.pbtxt",
                field="streaming",
            )
        request = Request(
            _prompt(tensors),
            tensors.required_number("request_output_len"),
            streaming=streaming,
            sampling_config=_sampling_config(tensors),
            output_config=self._output_config(tensors),
            end_id=self._end_id(tensors),
            pad_id=tensors.number("pad_id"),
            stop_words=word_list("stop_words_list", tensors.array("stop_words_list")),
            bad_words=word_list("bad_words_list", tensors.array("bad_words_list")),
            embedding_bias=self._embedding_bias(tensors),
            external_draft_tokens_config=_draft_tokens(tensors),
            lookahead_config=_lookahead(tensors),
            kv_cache_retention_config=_retention(tensors),
            guided_decoding_params=_guide(tensors),
            num_return_sequences=self._num_return_sequences(tensors),
            context_phase_params=from_tensor(tensors.array("context_phase_params")),
        )
        wants_input, wants_output = tensors.flag("return_num_input_tokens"), tensors.flag("return_num_output_tokens")
        tensors.check_empty()
        self._apply_parameters(request, timeout_us, parameters)
        return RowRequest(request, wants_input, wants_output)

    def _output_config(self, tensors: _Tensors) -> OutputConfig:
        excludes = tensors.flag("exclude_input_in_output", self._exclude_input)
        wants_metrics = tensors.flag("return_perf_metrics") | tensors.flag("return_kv_cache_reuse_stats")
        return OutputConfig(
            return_log_probs=tensors.flag("return_log_probs"),
            return_context_logits=tensors.flag("return_context_logits"),
            return_generation_logits=tensors.flag("return_generation_logits"),
            exclude_input_from_output=excludes,
            return_perf_metrics=wants_metrics,
        )

    def _end_id(self, tensors: _Tensors) -> int | None:
        """A token that the vocabulary lacks ends nothing: clients without a tokenizer send GPT-2's."""
        end_id: int | None = tensors.number("end_id")
        return None if end_id is None or end_id >= self._vocab_size else end_id

    def _embedding_bias(self, tensors: _Tensors) -> Any:
        """Padded to the model's vocabulary, which may be larger than the tokenizer's."""
        bias = tensors.array("embedding_bias")
        if bias is None or not bias.any():
            return None
        if bias.size > self._vocab_size:
            raise InvalidRequestError(
                f"embedding_bias has {bias.size} values; the vocabulary has {self._vocab_size} tokens",
                field="embedding_bias",
            )
        return np.pad(bias.astype(np.float32), (0, self._vocab_size - bias.size))

    def _num_return_sequences(self, tensors: _Tensors) -> int:
        number = tensors.number("num_return_sequences")
        if number is not None and number > 1 and not self._decoupled:
            raise InvalidRequestError(
                f"num_return_sequences is {number}; more than 1 needs a decoupled model", field="num_return_sequences"
            )
        return 1 if number is None else number

    def _apply_parameters(self, request: Request, timeout_us: int, parameters: Mapping[str, Any]) -> None:
        """Triton's own fields, which some of its endpoints pass on as parameters of the same name."""
        timeout = timeout_us
        for name, value in parameters.items():
            if name in ("priority", "priority_level"):
                request.priority = self._priorities.priority(name, value)
            elif name == "timeout":
                timeout = value
            elif name == "request_type":
                request.type = _request_type(value)
            elif name.lower() not in ("streaming", "binary_data_output", "triton_enable_empty_final_response"):
                raise InvalidRequestError(
                    f"request parameter {name} is unknown; known are priority_level, request_type, timeout", field=name
                )
        if not isinstance(timeout, int) or timeout < 0:
            raise InvalidRequestError(f"timeout is {timeout!r}; it must be a number of microseconds", field="timeout")
        if timeout:
            request.allotted_time_ms = -(-timeout // 1000)


def with_tensor_name(error: RequestError) -> str:
    """An error's message, with the name of the tensor whose value is at fault where the field has another."""
    field = error.field.removeprefix("request.")
    tensor = _TENSOR_OF_FIELD.get(field)
    return error.message if tensor is None or tensor in error.message else f"{tensor}: {error.message}"


def word_list(name: str, words: Any) -> list[list[int]] | None:
    """Token sequences out of `[2, n]`: their ids one after the other, above the ends of each, filled up with -1."""
    if words is None:
        return None
    if words.ndim != 2 or len(words) != 2:
        raise InvalidRequestError(f"{name} has the shape {list(words.shape)}; it must be [2, n]", field=name)
    ids, padded_ends = words.tolist()
    ends = [end for end in padded_ends if end != -1]
    if any(after < before for before, after in pairwise([0, *ends])) or (ends and ends[-1] > len(ids)):
        raise InvalidRequestError(
            f"{name} has the ends {ends} over {len(ids)} ids; they must ascend, within the ids, -1 after the last",
            field=name,
        )
    found = [ids[begin:end] for begin, end in pairwise([0, *ends])]
    return found or None


class _Tensors:
    """Takes values out by name, so that what is left at the end is unknown."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def number(self, name: str) -> Any:
        return self._taken(name, lambda value: not isinstance(value, list | np.ndarray), "one number")

    def required_number(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidRequestError(f"a value is required for {name}", field=name)
        return self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.number(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        value = self._taken(name, lambda value: isinstance(value, list) and len(value) == 1, "one text")
        return None if value is None else value[0]

    def array(self, name: str) -> Any:
        value = self.values.pop(name, None)
        if isinstance(value, list):
            raise InvalidRequestError(f"{name} must hold numbers", field=name)
        return None if value is None else np.atleast_1d(value)

    def check_empty(self) -> None:
        for name in self.values:
            raise InvalidRequestError(f"tensor {name} is unknown", field=name)

    def _taken(self, name: str, is_right: Callable[[Any], bool], right: str) -> Any:
        value = self.values.pop(name, None)
        if value is not None and not is_right(value):
            raise InvalidRequestError(f"{name} must be {right} in each row", field=name)
        return value


def _refuse(tensors: _Tensors) -> None:
    for name, why in _REFUSED.items():
        value = tensors.values.pop(name, None)
        is_empty = value is None or (isinstance(value, np.ndarray) and value.size == 0)
        if not is_empty and not (name == "decoder_input_lengths" and value == 0):
            raise UnsupportedFeatureError(f"{name} is not supported: {why}", field=name)
    for name, neutral in _WITHOUT_EFFECT.items():
        value = tensors.number(name)
        if value is not None and value not in neutral:
            raise UnsupportedFeatureError(f"{name} is not supported: {_BEAM}", field=name)
    beam_width = tensors.number("beam_width")
    if beam_width is not None and beam_width != 1:
        message = f"beam_width is {beam_width}; it must be 1: beam search is not offered"
        raise UnsupportedFeatureError(message, field="beam_width")


def _prompt(tensors: _Tensors) -> list[int]:
    ids = tensors.array("input_ids")
    if ids is None:
        raise InvalidRequestError("a value is required for input_ids", field="input_ids")
    length = tensors.required_number("input_lengths")
    if not 0 <= length <= ids.size:
        raise InvalidRequestError(f"input_lengths is {length}; input_ids has {ids.size} tokens", field="input_lengths")
    prompt: list[int] = ids.ravel()[:length].tolist()
    return prompt


def _sampling_config(tensors: _Tensors) -> SamplingConfig:
    """With neither top-k nor top-p the likeliest token is taken, whatever the temperature, as upstream did."""
    values: dict[str, Any] = {}
    for name, field in _SAMPLING.items():
        value = tensors.number(name)
        if value is None:
            continue
        if field in values and values[field] != value:
            raise InvalidRequestError(f"{name} is {value}, and under its other name {values[field]}", field=name)
        values[field] = value
    if values.get("top_p", 1) <= 0:
        del values["top_p"]
    if not values.get("top_k") and "top_p" not in values:
        values["top_k"] = 1
    return SamplingConfig(**values)


def _draft_tokens(tensors: _Tensors) -> ExternalDraftTokensConfig | None:
    drafts = tensors.array("draft_input_ids")
    return None if drafts is None or drafts.size == 0 else ExternalDraftTokensConfig(drafts.ravel().tolist())


def _lookahead(tensors: _Tensors) -> LookaheadDecodingConfig | None:
    names = [f"lookahead_{name}" for name in ("window_size", "ngram_size", "verification_set_size")]
    sizes = [tensors.number(name) for name in names]
    if all(size is None for size in sizes):
        return None
    if None in sizes:
        raise InvalidRequestError(f"{', '.join(names)} go together; give all of them or none", field=names[0])
    return LookaheadDecodingConfig(*sizes)


def _guide(tensors: _Tensors) -> GuidedDecodingParams | None:
    kind, guide = tensors.text("guided_decoding_guide_type"), tensors.text("guided_decoding_guide")
    if kind is None and guide is None:
        return None
    if kind is None or kind not in _GUIDE_TYPES:
        raise InvalidRequestError(
            f"guided_decoding_guide_type is {kind!r}; it must be one of {', '.join(_GUIDE_TYPES)}",
            field="guided_decoding_guide_type",
        )
    return GuidedDecodingParams(_GUIDE_TYPES[kind], guide)


def _retention(tensors: _Tensors) -> KvCacheRetentionConfig | None:
    """Ranges of the prompt, and the output's blocks; -1 stands for no end and no duration."""
    starts = tensors.array("retention_token_range_starts")
    num_ranges = 0 if starts is None else starts.size
    ends = _range_values(tensors, "ends", num_ranges)
    priorities = _range_values(tensors, "priorities", num_ranges)
    durations = _range_values(tensors, "durations_ms", num_ranges, -1)
    decode_priority = tensors.number("retention_decode_priority")
    decode_duration = tensors.number("retention_decode_duration_ms")
    if starts is None and decode_priority is None and decode_duration is None:
        return None
    ranges = [
        KvCacheRetentionConfig.TokenRangeRetentionConfig(start, _unless_none(end), priority, _unless_none(duration))
        for start, end, priority, duration in zip(
            [] if starts is None else starts.ravel().tolist(), ends, priorities, durations, strict=True
        )
    ]
    given = {} if decode_priority is None else {"decode_retention_priority": decode_priority}
    return KvCacheRetentionConfig(ranges, decode_duration_ms=_unless_none(decode_duration), **given)


def _range_values(tensors: _Tensors, column: str, num_ranges: int, default: int | None = None) -> list[int]:
    """One value for each range."""
    name = f"retention_token_range_{column}"
    values = tensors.array(name)
    if values is None and default is not None:
        return [default] * num_ranges
    size = 0 if values is None else values.size
    if size != num_ranges:
        raise InvalidRequestError(
            f"{name} has {size} values for {num_ranges} ranges; there is one for each range", field=name
        )
    return [] if values is None else [int(value) for value in values.ravel()]


def _unless_none(value: int | None) -> int | None:
    return None if value in (None, -1) else value


def _request_type(value: Any) -> RequestType:
    types = {
        "context_and_generation": RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
        "context_only": RequestType.REQUEST_TYPE_CONTEXT_ONLY,
        "generation_only": RequestType.REQUEST_TYPE_GENERATION_ONLY,
    }
    if value not in types:
        raise InvalidRequestError(
            f"request parameter request_type is {value!r}; it must be one of {', '.join(types)}", field="request_type"
        )
    return types[value]
