"""The sampler's definition, one row at a time in float64: slow, and plain enough to be read as the specification."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor.sampling import SamplingSpec


def edited_logits(raw: NDArray[np.float32], spec: SamplingSpec, token_ids: list[int]) -> NDArray[np.float64]:
    """Logits after temperature, bias, penalties and bans, for the token that follows `token_ids`."""
    config = spec.config
    prompt = list(spec.prompt_token_ids)
    generated = token_ids[len(prompt) :]
    logits = raw.astype(np.float64)
    if spec.embedding_bias is not None:
        logits = logits + spec.embedding_bias
    logits = logits / (config.temperature or 1.0)

    counted = prompt[config.prompt_ignore_length or 0 :] + generated
    for token_id in set(token_ids):
        penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
        logits[token_id] *= penalty if logits[token_id] < 0 else 1 / penalty
        count = counted.count(token_id)
        if count:
            logits[token_id] -= (config.presence_penalty or 0.0) + (config.frequency_penalty or 0.0) * count

    banned = {word[-1] for word in spec.bad_words if _ends_with(token_ids, word[:-1])}
    if len(generated) < (config.min_tokens or 0):
        banned |= set(spec.stop_token_ids) | ({spec.end_id} if spec.end_id is not None else set())
        banned |= {word[-1] for word in spec.stop_words if _ends_with(generated, word[:-1])}
    size = config.no_repeat_ngram_size
    if size is not None:
        for begin in range(len(token_ids) - size + 1):
            *before, last = token_ids[begin : begin + size]
            if _ends_with(token_ids, before):
                banned.add(last)
    logits[sorted(banned)] = -np.inf
    return logits


def probabilities(raw: NDArray[np.float32], spec: SamplingSpec, token_ids: list[int]) -> NDArray[np.float64]:
    """The distribution of the token that follows `token_ids`."""
    config = spec.config
    logits = edited_logits(raw, spec, token_ids)
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp(logits[order] - logits[order[0]])
    if config.is_greedy:
        weights[1:] = 0
    if config.top_k:
        weights[config.top_k :] = 0
    top_p = _top_p(spec, token_ids)
    if 0 < top_p < 1:
        before = np.cumsum(weights) - weights
        weights[before >= top_p * weights.sum()] = 0
    weights[weights < (config.min_p or 0.0)] = 0
    result = np.zeros(len(logits))
    result[order] = weights / weights.sum()
    return result


def log_probabilities(raw: NDArray[np.float32]) -> NDArray[np.float64]:
    """Under the softmax of the raw logits."""
    logits = raw.astype(np.float64)
    largest = logits.max()
    result: NDArray[np.float64] = logits - largest - np.log(np.exp(logits - largest).sum())
    return result


def _top_p(spec: SamplingSpec, token_ids: list[int]) -> float:
    config = spec.config
    first = config.top_p or 0.0
    decay = 1.0 if config.top_p_decay is None else config.top_p_decay
    top_p = first
    for token_id in token_ids[len(spec.prompt_token_ids) :]:
        floor = min(first, 1e-6 if config.top_p_min is None else config.top_p_min)
        top_p = first if token_id == config.top_p_reset_ids else max(top_p * decay, floor)
    return top_p


def _ends_with(token_ids: list[int], end: list[int] | tuple[int, ...]) -> bool:
    return len(end) <= len(token_ids) and token_ids[len(token_ids) - len(end) :] == list(end)
