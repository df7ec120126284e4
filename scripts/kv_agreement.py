"""Greedy tokens with 8-bit keys and values against bfloat16 ones: memory, and agreement on 100 prompts.

Two figures, since one token that differs changes all after it: tokens that agree when each follows the same tokens
(those generated in bfloat16), and whole answers that stay the same when each goes its own way.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from bench_engine import ROOT, demo_engine
from rich.console import Console

from engine_build.command_line import run
from executor import Executor, ExecutorConfig, KvCacheConfig, OutputConfig, Request
from executor.text import Tokenizer

NUM_PROMPTS = 100
REQUESTS = ("", "Answer in one sentence. ", "Explain it to a child. ", "Be brief. ", "Give an example. ")
"""Put before each question of `tests/data/chat_prompts.json`."""


class Answers(NamedTuple):
    tokens: list[list[int]]
    kv_bytes_per_block: int
    tokens_per_block: int


def main(
    num_tokens: Annotated[int, typer.Option("--num_tokens", help="Tokens of each answer.", min=1)] = 32,
    quick: Annotated[bool, typer.Option("--quick", help="8 tokens of 24 prompts: under 50 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
) -> None:
    """Answer the prompts twice, then ask for the next token behind each beginning of the bfloat16 answers."""
    console = Console(stderr=as_json)
    engine_dir = demo_engine("bfloat16")
    if quick:
        num_tokens = 8
    prompts = chat_prompts(engine_dir)[: 24 if quick else NUM_PROMPTS]
    wide = answers(engine_dir, None, prompts, num_tokens)
    narrow = answers(engine_dir, "uint8", prompts, num_tokens)
    beginnings = [
        prompt + answer[:end] for prompt, answer in zip(prompts, wide.tokens, strict=True) for end in range(len(answer))
    ]
    following = answers(engine_dir, "uint8", beginnings, 1)
    expected = [token for answer in wide.tokens for token in answer]
    num_same = sum(tokens == [token] for tokens, token in zip(following.tokens, expected, strict=True))
    same_answers = [one == other for one, other in zip(narrow.tokens, wide.tokens, strict=True)]
    until = [common_prefix(one, other) for one, other in zip(narrow.tokens, wide.tokens, strict=True)]
    result = {
        "prompts": len(prompts),
        "tokens": len(expected),
        "kv_bytes_per_token_bf16": wide.kv_bytes_per_block / wide.tokens_per_block,
        "kv_bytes_per_token_8bit": narrow.kv_bytes_per_block / narrow.tokens_per_block,
        "kv_bytes_8bit_over_bf16": narrow.kv_bytes_per_block / wide.kv_bytes_per_block,
        "token_agreement": num_same / len(expected),
        "same_answers": sum(same_answers) / len(same_answers),
        "mean_tokens_until_first_difference": statistics.fmean(until),
    }
    console.print(
        f"keys and values of a token: {result['kv_bytes_per_token_bf16']:.0f} bytes in bfloat16, "
        f"{result['kv_bytes_per_token_8bit']:.0f} in 8 bits ({result['kv_bytes_8bit_over_bf16']:.3f})\n"
        f"{len(prompts)} prompts, {num_tokens} greedy tokens each: {result['token_agreement']:.1%} of tokens agree "
        f"behind the same beginning, {result['same_answers']:.0%} of answers are the same throughout, "
        f"{result['mean_tokens_until_first_difference']:.1f} tokens until they part"
    )
    if as_json:
        print(json.dumps(result))


def chat_prompts(engine_dir: Path) -> list[list[int]]:
    """Token ids of chat prompts, ready for an answer."""
    tokenizer = Tokenizer(engine_dir / "tokenizer")
    questions = json.loads((ROOT / "tests" / "data" / "chat_prompts.json").read_text(encoding="utf-8"))
    asked = product(REQUESTS, questions)
    return [tokenizer.encode_chat([{"role": "user", "content": request + question}]) for request, question in asked]


def answers(engine_dir: Path, kv_cache_dtype: str | None, prompts: Sequence[list[int]], num_tokens: int) -> Answers:
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(kv_cache_dtype=kv_cache_dtype, max_tokens=32 * 1024))
    output = OutputConfig(exclude_input_from_output=True)
    with Executor(engine_dir, config) as executor:
        ids = executor.enqueue_requests([Request(prompt, num_tokens, output_config=output) for prompt in prompts])
        tokens = [response.result.output_token_ids[0] for (response,) in executor.await_responses(ids)]
        return Answers(tokens, executor.spec.kv_bytes_per_block, executor.spec.tokens_per_block)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


if __name__ == "__main__":
    run(main, "scripts/kv_agreement")
