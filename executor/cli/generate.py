"""`executor generate`: answers from an engine directory, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine_build.command_line import require_folder_of
from executor import Executor, InvalidRequestError, RequestError
from executor.cli import options
from executor.cli.answers import AnswerView, answer_view
from executor.cli.opening import configure_logging, end_ids, one_line_errors, opened_executor, opened_tokenizer
from executor.cli.table import iteration_table, write_csv
from executor.serving.events import Delta, Finished
from executor.serving.generation import GenerationService
from executor.serving.generation_request import ChatMessage, ChatPrompt, GenerationRequest, Prompt, TextPrompt
from executor.text import Tokenizer

_TABLE_ROWS = 100_000


def generate(
    engine_dir: options.EngineDir,
    prompt: Annotated[list[str], typer.Option("--prompt", help="May be repeated: all run at once.")],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Whether prompts are a user's chat messages or plain text; chat where the model has a template.",
            show_default=False,
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    table: Annotated[bool, typer.Option("--table", help="Print the iteration table at the end.")] = False,
    table_csv: Annotated[
        Path | None, typer.Option("--table_csv", help="Write the iteration table, every row, to this file.")
    ] = None,
    max_batch_size: options.MaxBatchSize = None,
    max_num_tokens: options.MaxNumTokens = None,
    kv_cache_max_tokens: options.KvCacheMaxTokens = None,
    kv_cache_free_gpu_mem_fraction: options.KvCacheFraction = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    enable_block_reuse: options.BlockReuse = True,
    capacity_scheduler_policy: options.CapacityPolicy = options.CapacityPolicyName.GUARANTEED_NO_EVICT,
    context_chunking_policy: options.ChunkingPolicy = options.ChunkingPolicyName.FIRST_COME_FIRST_SERVED,
    deterministic: options.Deterministic = False,
    num_threads: options.NumThreads = None,
    device_id: options.DeviceId = None,
    gpu_weights_percent: options.GpuWeightsPercent = 1.0,
    cuda_graph_mode: options.CudaGraphMode = None,
    cuda_graph_cache_size: options.CudaGraphCacheSize = 0,
    log_level: options.LogLevel = options.LogLevelName.WARNING,
) -> None:
    """Generate answers to prompts, all at once, and stream them."""
    configure_logging(log_level)
    with one_line_errors():
        require_folder_of(table_csv)
    config = options.executor_config(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        kv_cache_max_tokens=kv_cache_max_tokens,
        kv_cache_free_gpu_mem_fraction=kv_cache_free_gpu_mem_fraction,
        kv_cache_dtype=kv_cache_dtype,
        enable_block_reuse=enable_block_reuse,
        capacity_scheduler_policy=capacity_scheduler_policy,
        context_chunking_policy=context_chunking_policy,
        deterministic=deterministic,
        num_threads=num_threads,
        device_id=device_id,
        gpu_weights_percent=gpu_weights_percent,
        cuda_graph_mode=cuda_graph_mode,
        cuda_graph_cache_size=cuda_graph_cache_size,
        iteration_table_max_rows=_TABLE_ROWS if table or table_csv is not None else 0,
    )
    sampling = options.sampling_config(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, repetition_penalty=repetition_penalty
    )
    with opened_executor(engine_dir, config) as executor:
        tokenizer = opened_tokenizer(executor)
        as_chat = tokenizer is not None and tokenizer.chat_template is not None if chat is None else chat
        requests = [
            GenerationRequest(
                _prompt(text, as_chat),
                max_tokens=max_tokens,
                sampling_config=sampling,
                stop_strings=stop or (),
                ignore_eos=ignore_eos,
            )
            for text in prompt
        ]
        console = Console()
        asyncio.run(_answer_all(executor, tokenizer, requests, answer_view(console, prompt)))
        rows = executor.iteration_table()
        if table:
            console.print(iteration_table(rows))
        if table_csv is not None:
            write_csv(rows, table_csv)


def _prompt(text: str, as_chat: bool) -> Prompt:
    if not text:  # a chat template would make a conversation of it all the same
        raise InvalidRequestError("--prompt: the text is empty", field="prompt")
    return ChatPrompt([ChatMessage("user", text)]) if as_chat else TextPrompt(text)


async def _answer_all(
    executor: Executor, tokenizer: Tokenizer | None, requests: list[GenerationRequest], view: AnswerView
) -> None:
    ends = end_ids(executor, tokenizer)
    service = GenerationService(executor, tokenizer, end_ids=ends, default_max_tokens=options.DEFAULT_MAX_TOKENS)

    async def answer(index: int, request: GenerationRequest) -> None:
        with await service.start(request) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    view.add(index, event.text)
                elif isinstance(event, Finished):
                    view.finish(index, f"{event.finish_reason.name}, {event.usage.completion_tokens} tokens")

    try:
        with view:
            async with asyncio.TaskGroup() as tasks:
                for index, request in enumerate(requests):
                    tasks.create_task(answer(index, request))
    except* RequestError as errors:
        raise errors.exceptions[0] from None
    finally:
        service.close()
