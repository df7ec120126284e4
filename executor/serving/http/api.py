"""One answer of the API, from its body to its JSON: completions and chat completions differ in these functions only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from batch_manager.request import FinishReason
from executor.api.errors import InvalidRequestError
from executor.serving.events import Delta
from executor.serving.generation_request import (
    MAX_TOP_LOG_PROBS,
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from executor.serving.http.body import Body, is_token_ids
from executor.serving.http.log_probs import chat_log_probs, completion_log_probs
from executor.text import Tokenizer

FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timed_out",
    FinishReason.CANCELLED: "cancelled",
}
"""The last two are not OpenAI's: there is no honest one for them."""

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for completions; chat completions have no limit of their own."""
_MAX_COMPLETION_LOG_PROBS = 5


@dataclass(slots=True)
class Asked:
    """What a body asks for beside the common parameters."""

    prompts: list[Prompt]
    max_tokens: int | None
    num_top_log_probs: int | None
    """`None`: no log probabilities."""


@dataclass(slots=True)
class ChoiceState:
    """One choice while it is written."""

    text_length: int = 0
    num_tokens: int = 0
    is_begun: bool = False
    delta: Delta | None = None
    """All of it, for an answer that does not stream."""
    finish_reason: FinishReason | None = None


class Api(ABC):
    """How an endpoint reads its body and writes its choices."""

    id_prefix: str
    object_name: str
    chunk_name: str

    @abstractmethod
    def take(self, body: Body) -> Asked:
        """Read the endpoint's own fields."""

    @abstractmethod
    def choice(self, index: int, state: ChoiceState, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def chunk(self, index: int, state: ChoiceState, delta: Delta, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A streamed piece of a choice."""

    @abstractmethod
    def last_chunk(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The streamed end of a choice."""


class CompletionsApi(Api):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def take(self, body: Body) -> Asked:
        body.only("best_of", 1)
        body.only("echo", False)
        body.only("suffix", "")
        log_probs = body.integer("logprobs", least=0)
        if log_probs is not None and log_probs > _MAX_COMPLETION_LOG_PROBS:
            raise body.wrong("logprobs", log_probs, f"at most {_MAX_COMPLETION_LOG_PROBS}")
        max_tokens = body.integer("max_tokens")
        return Asked(
            _completion_prompts(body), _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens, log_probs
        )

    def choice(self, index: int, state: ChoiceState, tokenizer: Tokenizer | None) -> dict[str, Any]:
        delta = state.delta or Delta(0, "", [])
        return self.chunk(index, state, delta, tokenizer)

    def chunk(self, index: int, state: ChoiceState, delta: Delta, tokenizer: Tokenizer | None) -> dict[str, Any]:
        log_probs = completion_log_probs(tokenizer, delta, state.text_length) if delta.log_probs else None
        finish_reason = None if state.finish_reason is None else FINISH_REASONS[state.finish_reason]
        return {"index": index, "text": delta.text, "logprobs": log_probs, "finish_reason": finish_reason}

    def last_chunk(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}


class ChatCompletionsApi(Api):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def take(self, body: Body) -> Asked:
        body.only("tools", [])
        body.only("functions", [])
        body.only("tool_choice", "none", "auto")
        body.only("modalities", ["text"])
        body.only("reasoning_effort", "none")
        body.only("verbosity", "medium")
        body.ignore("parallel_tool_calls")
        wants_log_probs = body.flag("logprobs")
        top = body.integer("top_logprobs", least=0)
        if top is not None and not wants_log_probs:
            raise InvalidRequestError("top_logprobs needs logprobs", field="top_logprobs")
        if top is not None and top > MAX_TOP_LOG_PROBS:
            raise body.wrong("top_logprobs", top, f"at most {MAX_TOP_LOG_PROBS}")
        newer, older = body.integer("max_completion_tokens"), body.integer("max_tokens")
        messages = [_chat_message(message) for message in body.objects("messages")]
        return Asked([ChatPrompt(messages)], older if newer is None else newer, (top or 0) if wants_log_probs else None)

    def choice(self, index: int, state: ChoiceState, tokenizer: Tokenizer | None) -> dict[str, Any]:
        delta = state.delta or Delta(0, "", [])
        assert state.finish_reason is not None, "a choice is written when it has finished"
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": chat_log_probs(tokenizer, delta) if delta.log_probs else None,
            "finish_reason": FINISH_REASONS[state.finish_reason],
        }

    def chunk(self, index: int, state: ChoiceState, delta: Delta, tokenizer: Tokenizer | None) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text}
        if not state.is_begun:
            content = {"role": "assistant", **content}
        return {
            "index": index,
            "delta": content,
            "logprobs": chat_log_probs(tokenizer, delta) if delta.log_probs else None,
            "finish_reason": None,
        }

    def last_chunk(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}


def _completion_prompts(body: Body) -> list[Prompt]:
    value = body.take("prompt")
    if isinstance(value, str):
        return [TextPrompt(value)]
    if isinstance(value, list) and value:
        if is_token_ids(value):
            return [TokenPrompt(value)]
        if all(isinstance(item, str) for item in value):
            return [TextPrompt(item) for item in value]
        if all(is_token_ids(item) for item in value):
            return [TokenPrompt(item) for item in value]
    raise body.wrong("prompt", value, "a string, a list of token ids, or a list of either")


def _chat_message(message: Body) -> ChatMessage:
    role = message.text("role")
    if not role:
        raise message.wrong("role", role, "who speaks")
    content = message.take("content")
    message.ignore("name")
    message.only("refusal")
    message.only("tool_calls", [])
    message.only("tool_call_id")
    message.finish()
    if isinstance(content, str):
        return ChatMessage(role, content)
    if isinstance(content, list):
        parts = [Body(part, f"{message.name('content')}[{index}]") for index, part in enumerate(content)]
        return ChatMessage(role, "".join(_text_part(part) for part in parts))
    raise message.wrong("content", content, "a string or a list of text parts")


def _text_part(part: Body) -> str:
    part.only("type", "text")
    text = part.text("text")
    if text is None:
        raise part.wrong("text", text, "a string")
    part.finish()
    return text
