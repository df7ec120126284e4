"""How the next token is chosen. Field names are those of `tensorrt_llm.bindings.executor.SamplingConfig`."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from executor.api.errors import InvalidRequestError
from executor.api.renamed import renamed
from executor.api.support import refused, supported

_BEAM = "beam search is not offered; beam_width must be 1"

_MOST_TEMPERATURE = _MOST_PENALTY = 1e4
_LEAST_TEMPERATURE, _LEAST_FACTOR = 1e-6, 1e-4
"""Sampling computes in float32: within these bounds no logit of a real model becomes infinite or loses its rank. Beyond
them the answer would be garbage, or fail as if the engine had."""


@renamed(random_seed="seed", min_length="min_tokens")
@dataclass(slots=True)
class SamplingConfig:
    """Sampling parameters; `None` means the neutral value.

    With neither `top_k`, `top_p` nor `temperature` set, decoding is greedy, as upstream's default (`top_k` of 1).
    A `temperature` of 0 is greedy as well.
    """

    beam_width: int = supported(1, "1 only: beam search is not offered")
    _: KW_ONLY
    top_k: int | None = None
    """Keep the `top_k` most likely tokens; 0 keeps all."""
    top_p: float | None = None
    """Keep the most likely tokens whose probabilities reach `top_p`; 0 and 1 keep all."""
    top_p_min: float | None = None
    """Lower bound for a decaying `top_p`."""
    top_p_reset_ids: int | None = None
    """Token that sets a decayed `top_p` back."""
    top_p_decay: float | None = None
    """Factor on `top_p` after each token, in (0, 1]."""
    seed: int | None = None
    """Fixes the draws of this request, whatever else is in the batch. Unset: a random seed."""
    temperature: float | None = None
    min_tokens: int | None = None
    """The end id and stop words are masked before so many generated tokens."""
    beam_search_diversity_rate: float | None = refused(None, _BEAM)
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    """The first so many prompt tokens do not count for penalties."""
    length_penalty: float | None = refused(None, _BEAM)
    early_stopping: int | None = refused(None, _BEAM)
    no_repeat_ngram_size: int | None = None
    """No sequence of so many tokens occurs twice."""
    num_return_sequences: int | None = None
    min_p: float | None = None
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    beam_width_array: list[int] | None = refused(None, _BEAM)

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the first field that is out of range."""
        if self.beam_width != 1:
            _fail("beam_width", self.beam_width, "1 (beam search is not offered)")
        _check("top_k", self.top_k, lambda v: v >= 0, "0 (all) or more")
        _check("top_p", self.top_p, lambda v: 0 <= v <= 1, "in [0, 1]")
        _check("top_p_min", self.top_p_min, lambda v: 0 < v <= 1, "in (0, 1]")
        _check("top_p_decay", self.top_p_decay, lambda v: 0 < v <= 1, "in (0, 1]")
        _check("top_p_reset_ids", self.top_p_reset_ids, lambda v: v >= 0, "a token id")
        _check("seed", self.seed, lambda v: 0 <= v < 2**64, "an unsigned 64-bit integer")
        _check(
            "temperature",
            self.temperature,
            lambda v: v == 0 or _LEAST_TEMPERATURE <= v <= _MOST_TEMPERATURE,
            f"0 (greedy) or in [{_LEAST_TEMPERATURE:g}, {_MOST_TEMPERATURE:g}]",
        )
        _check("min_tokens", self.min_tokens, lambda v: v >= 0, "0 or more")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            lambda v: _LEAST_FACTOR <= v <= _MOST_PENALTY,
            f"in [{_LEAST_FACTOR:g}, {_MOST_PENALTY:g}]",
        )
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _check(
                f"{name}_penalty",
                value,
                lambda v: abs(v) <= _MOST_PENALTY,
                f"in [-{_MOST_PENALTY:g}, {_MOST_PENALTY:g}]",
            )
        _check("prompt_ignore_length", self.prompt_ignore_length, lambda v: v >= 0, "0 or more")
        _check("no_repeat_ngram_size", self.no_repeat_ngram_size, lambda v: v >= 1, "1 or more")
        _check("num_return_sequences", self.num_return_sequences, lambda v: v >= 1, "1 or more")
        _check("min_p", self.min_p, lambda v: 0 <= v <= 1, "in [0, 1]")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        if self.temperature == 0 or self.top_k == 1:
            return True
        return self.temperature is None and self.top_k is None and not self.top_p and not self.min_p


def _check(name: str, value: Any, is_right: Any, right: str) -> None:
    if value is not None and not (math.isfinite(value) and is_right(value)):
        _fail(name, value, right)


def _fail(name: str, value: Any, right: str) -> None:
    raise InvalidRequestError(
        f"sampling_config.{name} is {value!r}; it must be {right}", field=f"sampling_config.{name}"
    )
