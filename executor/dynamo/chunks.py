"""From a generation's events to the chunks that Dynamo's frontend reads."""

from __future__ import annotations

from typing import Any

from batch_manager.request import FinishReason
from executor.dynamo.handover import Ended, to_json
from executor.serving.events import Delta, Finished, TokenLogProb

_FINISH_REASONS = {
    FinishReason.END_ID: "eos",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "cancelled",
    FinishReason.CANCELLED: "cancelled",
}


def delta_chunk(delta: Delta) -> dict[str, Any]:
    """New tokens, and their log probabilities where they were asked for."""
    chunk: dict[str, Any] = {"index": delta.output_index, "token_ids": delta.token_ids}
    if delta.log_probs:
        chunk["log_probs"] = [token.log_prob for token in delta.log_probs]
        chunk["top_logprobs"] = [
            _candidates(token_id, token) for token_id, token in zip(delta.token_ids, delta.log_probs, strict=True)
        ]
    return chunk


def _candidates(token_id: int, token: TokenLogProb) -> list[dict[str, Any]]:
    """The chosen token first, then the likeliest of the others."""
    ranked = [(rank, other, log_prob) for rank, (other, log_prob) in enumerate(token.top, start=1)]
    chosen = next((entry for entry in ranked if entry[1] == token_id), (0, token_id, token.log_prob))
    return [
        {"rank": rank, "token_id": other, "logprob": log_prob}
        for rank, other, log_prob in [chosen, *(entry for entry in ranked if entry[1] != token_id)]
    ]


def ended_chunk(ended: Ended, prompt_tokens: int) -> dict[str, Any]:
    """All of an output that ended with its context."""
    return {
        "index": 0,
        "token_ids": ended.token_ids,
        "finish_reason": ended.finish_reason,
        "completion_usage": _usage(prompt_tokens, len(ended.token_ids), 0),
    }


def final_chunk(finished: Finished) -> dict[str, Any]:
    """Why an output ended, and what it used."""
    usage = finished.usage
    chunk: dict[str, Any] = {
        "index": finished.output_index,
        "token_ids": [],
        "finish_reason": _FINISH_REASONS[finished.finish_reason],
        "completion_usage": _usage(usage.prompt_tokens, usage.completion_tokens, usage.reused_tokens),
    }
    if finished.prompt_log_probs:
        chunk["engine_data"] = {"prompt_logprobs": [None, *finished.prompt_log_probs]}
    return chunk


def context_chunk(delta: Delta, finished: Finished) -> dict[str, Any]:
    """All of a context: its token, and what is handed on to the instance that generates the rest."""
    chunk = final_chunk(finished) | delta_chunk(delta)
    ended = Ended(chunk["finish_reason"], delta.token_ids)
    return chunk | {"disaggregated_params": to_json(finished.context_phase_params or ended)}


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
