"""Chat templates: a conversation to the text that the model was trained on.

A template is a program that came with the checkpoint. It runs in jinja2's immutable sandbox: it can compute text, not
reach the interpreter, and not change what it is given. The names it may use beyond jinja2's own are those that
Hugging Face's templates rely on: `raise_exception`, `strftime_now`, `tojson` that leaves characters as they are,
`{% break %}`, `{% continue %}`, and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is malformed, or refuses the conversation: carries its own words."""


class MissingChatTemplateError(ChatTemplateError):
    """The model came without a chat template."""


class ChatTemplate:
    """A compiled template; rendering is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: jinja2 text.
            special_tokens: variables such as `bos_token` and `eos_token`.

        Raises:
            ChatTemplateError: the template is not valid jinja2.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is malformed, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        Args:
            messages: `{"role": ..., "content": ...}`, and what else the template knows.
            tools: JSON schemas of functions the model may call.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            variables: further variables of this template.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails on it.
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except _RefusedError as refusal:
            raise ChatTemplateError(f"the chat template refuses the conversation: {refusal.message}") from None
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template fails on the conversation: {error}") from error


class _RefusedError(TemplateError):
    """Raised by the template itself."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only stands around them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
