"""When a request ends. The order: end id, stop token ids, length, then, from `min_new_tokens` on, stop words."""

from __future__ import annotations

from collections.abc import Sequence

from batch_manager.request import FinishReason, Request


def check_stop(request: Request) -> FinishReason:
    """Why the request ends with its last token, if it does.

    An end id or stop token sampled below `min_new_tokens` ends it all the same: keeping them from being sampled is the
    sampler's task. Length wins over `min_new_tokens`, so that nothing runs on forever.
    """
    token_ids = request.token_ids
    token = token_ids[-1]
    if token in request.stop_ids:
        return FinishReason.END_ID if token == request.end_id else FinishReason.STOP_WORDS
    if len(token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH
    num_generated = len(token_ids) - request.num_prompt_tokens
    if request.stop_words and num_generated >= request.min_new_tokens:
        for word in request.stop_words:
            if len(word) <= num_generated and tuple(token_ids[-len(word) :]) == word:
                return FinishReason.STOP_WORDS
    return FinishReason.NOT_FINISHED


def append_until_stop(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason]:
    """Append tokens one by one until one ends the request; returns those appended and why it ended."""
    token_ids = request.token_ids
    if len(token_ids) + len(tokens) < request.num_tokens_unchecked and request.stop_ids.isdisjoint(tokens):
        token_ids.extend(tokens)
        return list(tokens), FinishReason.NOT_FINISHED
    for count, token in enumerate(tokens, start=1):
        token_ids.append(token)
        reason = check_stop(request)
        if reason is not FinishReason.NOT_FINISHED:
            return list(tokens[:count]), reason
    return list(tokens), FinishReason.NOT_FINISHED
