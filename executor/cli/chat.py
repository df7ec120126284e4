"""`executor chat`: a conversation in the terminal, with a server or with an engine directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from executor import ExecutorConfig, SamplingConfig
from executor.cli import options
from executor.cli.opening import configure_logging, end_ids, one_line_errors, opened_executor, opened_tokenizer
from executor.client import AsyncInferenceClient, ConnectionOptions
from executor.serving.events import Delta, Event
from executor.serving.generation import GenerationService
from executor.serving.generation_request import ChatMessage, ChatPrompt, GenerationRequest

_CONNECTING_SECONDS = 10.0

Answerer = Callable[[GenerationRequest], AsyncGenerator[Event, None]]
"""Starts a request and yields its events."""


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            callback=options.server_address,
            help="HOST:PORT of a server, or an engine directory.",
            show_default=False,
        ),
    ],
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    bearer_token_file: options.SentTokenFile = None,
    tls_root_certificates: options.TlsRootCertificates = None,
    num_threads: options.NumThreads = None,
    log_level: options.LogLevel = options.LogLevelName.WARNING,
) -> None:
    """Talk with the model. An empty line or end of input ends the conversation."""
    configure_logging(log_level)
    conversation = Conversation(
        [] if system is None else [ChatMessage("system", system)],
        max_tokens=max_tokens,
        sampling_config=options.sampling_config(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        ),
    )
    with one_line_errors():
        if Path(target).is_dir():
            _chat_with_directory(Path(target), ExecutorConfig(num_threads=num_threads), conversation)
        else:
            connection = ConnectionOptions.from_files(tls_root_certificates, bearer_token_file)
            asyncio.run(_chat_with_server(target, connection, conversation))


class Conversation:
    """What was said so far, and how answers are made."""

    def __init__(self, messages: list[ChatMessage], *, max_tokens: int | None, sampling_config: SamplingConfig) -> None:
        self._messages = messages
        self._max_tokens = max_tokens
        self._sampling_config = sampling_config

    async def run(self, answerer: Answerer) -> None:
        """Read lines and print answers until an empty line or the end of input."""
        while True:
            try:
                said = await asyncio.to_thread(input, "> ")
            except EOFError:
                return
            if not said.strip():
                return
            self._messages.append(ChatMessage("user", said))
            self._messages.append(ChatMessage("assistant", await self._answer(answerer)))

    async def _answer(self, answerer: Answerer) -> str:
        request = GenerationRequest(
            ChatPrompt(list(self._messages)), max_tokens=self._max_tokens, sampling_config=self._sampling_config
        )
        # How much room the prompt leaves is known to the server alone: without `max_tokens` the answer is left instead.
        left = options.DEFAULT_MAX_TOKENS if self._max_tokens is None else self._max_tokens
        pieces = []
        async with aclosing(answerer(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    typer.echo(event.text, nl=False)
                    pieces.append(event.text)
                    left -= len(event.token_ids)
                    if left <= 0 and self._max_tokens is None:
                        break
        typer.echo()
        return "".join(pieces)


def _chat_with_directory(engine_dir: Path, config: ExecutorConfig, conversation: Conversation) -> None:
    with opened_executor(engine_dir, config) as executor:
        tokenizer = opened_tokenizer(executor)

        async def run() -> None:
            service = GenerationService(executor, tokenizer, end_ids=end_ids(executor, tokenizer))

            async def answerer(request: GenerationRequest) -> AsyncGenerator[Event, None]:
                with await service.start(request) as stream:
                    async for event in stream:
                        yield event

            try:
                await conversation.run(answerer)
            finally:
                service.close()

        asyncio.run(run())


async def _chat_with_server(target: str, connection: ConnectionOptions, conversation: Conversation) -> None:
    async with AsyncInferenceClient(target, connection) as client:
        # A server that is not there, or not for us, is told before anything is typed.
        await client.server_info(timeout=_CONNECTING_SECONDS)

        async def answerer(request: GenerationRequest) -> AsyncGenerator[Event, None]:
            with client.start(request) as generation:
                async for event in generation:
                    yield event

        await conversation.run(answerer)
