"""Log probabilities in the two shapes that OpenAI's API gives them."""

from __future__ import annotations

from typing import Any

from executor.serving.events import Delta
from executor.text import Tokenizer


def chat_log_probs(tokenizer: Tokenizer | None, delta: Delta) -> dict[str, Any]:
    """For chat completions: each token with its bytes, and the likeliest tokens in its place."""
    return {
        "content": [
            _entry(tokenizer, token_id, entry.log_prob)
            | {"top_logprobs": [_entry(tokenizer, top_id, log_prob) for top_id, log_prob in entry.top]}
            for token_id, entry in zip(delta.token_ids, delta.log_probs, strict=True)
        ],
        "refusal": None,
    }


def completion_log_probs(tokenizer: Tokenizer | None, delta: Delta, offset: int) -> dict[str, Any]:
    """For completions: parallel lists. `offset` is the length of the output's text before the delta."""
    tokens = [_token_text(tokenizer, token_id) for token_id in delta.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.log_prob for entry in delta.log_probs],
        "top_logprobs": [
            {_token_text(tokenizer, token_id): log_prob for token_id, log_prob in entry.top} or None
            for entry in delta.log_probs
        ],
        "text_offset": offsets,
    }


def _entry(tokenizer: Tokenizer | None, token_id: int, log_prob: float) -> dict[str, Any]:
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    return {"token": _token_text(tokenizer, token_id), "logprob": log_prob, "bytes": list(data)}


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token by itself; a part of a character, which has no text of its own, by its bytes."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
