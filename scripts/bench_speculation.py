"""Tokens per second of one request with prompt-lookup speculation over without, alternating, by kind of prompt.

Each answer is recorded first, without speculation. In all runs that are measured a logits post-processor leaves nothing
but the recorded token in each row: passes, drafts, draws and verification are real, and both sides give the same text.
Else answers would part where the two best logits tie, and one side may find more to copy.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from bench_engine import demo_engine
from rich.console import Console
from rich.table import Table

from engine_build.command_line import run
from executor import (
    Executor,
    ExecutorConfig,
    LogitsPostProcessorConfig,
    LookaheadDecodingConfig,
    OutputConfig,
    Request,
    Result,
    SamplingConfig,
)
from executor.text import Tokenizer

LOOKAHEAD = LookaheadDecodingConfig(max_window_size=8, max_ngram_size=4, max_verification_set_size=8)
CODE = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if name not in self.items:
            self.items[name] = 0
        self.items[name] += count

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name] < count:
            raise ValueError("not enough items")
        self.items[name] -= count
"""
ARTICLE = (
    "The harbour of Port Ellen was built in 1826 by the engineer Walter Campbell, who named the town after his first "
    "wife. For a hundred years it shipped barley, whisky and cattle to Glasgow. The lighthouse at Carraig Fhada was "
    "finished in 1832, and its keeper lived in a cottage that was cut off at high tide. In 1929 the distillery closed, "
    "and most of the families moved to the mainland. The ferry came back in 1974, and with it the first visitors."
)


class Recorded:
    """Gives each answer again."""

    name = "recorded"

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Prompt and answer of the case that is measured."""

    def __call__(self, request_id: int, logits: Any, token_ids: list[list[int]], stream: int) -> None:  # noqa: ARG002
        place = len(token_ids[0])
        if place < len(self.token_ids):  # a row behind a draft that is wrong may lie beyond the end
            token_id = self.token_ids[place]
            value = float(logits[0, 0, token_id])
            logits[:] = -math.inf
            logits[0, 0, token_id] = value


class Case(NamedTuple):
    prompt: str
    copies: bool
    """Whether most of the answer is in the prompt."""
    temperature: float | None = None
    """`None`: greedy. Drawn text repeats itself less than a small model's greedy text, which ends in loops."""


CASES = {
    "summary with quotes": Case(
        f"Summarise this article in a few sentences, quoting its most important sentences word for word:\n{ARTICLE}",
        copies=True,
    ),
    "proofreading": Case(f"Correct the spelling in this text, and return the whole text:\n{ARTICLE}", copies=True),
    "code edit": Case(
        f"Rewrite this Python class with `items` renamed to `stock`. Change nothing else:\n```python\n{CODE}```",
        copies=True,
    ),
    "story": Case("Write a story about a lighthouse keeper who finds a letter in a bottle.", copies=False),
    "story, drawn": Case("Write a story about a lighthouse keeper who finds a letter.", copies=False, temperature=1.0),
    "explanation, drawn": Case("Explain how vaccines work to a ten-year-old.", copies=False, temperature=1.0),
}


class Measured(NamedTuple):
    speed_up: float
    """Median of the rounds."""
    least: float
    """Of the rounds."""
    num_tokens: int
    tokens_per_iteration: float
    acceptance_rate: float


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds of up to 64 tokens: under 50 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
    num_tokens: Annotated[int, typer.Option(help="Most tokens of an answer; it ends where the model ends it.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times each prompt is asked, with and without.")] = 7,
    deterministic: Annotated[bool, typer.Option(help="Bit-equal logits.")] = True,
) -> None:
    """Measure on the CPU engine in bfloat16."""
    if quick:
        num_tokens, rounds = 64, 2
    console = Console(stderr=as_json)
    engine_dir = demo_engine()
    tokenizer = Tokenizer(engine_dir / "tokenizer")
    measured = {}
    recorded = Recorded()
    config = ExecutorConfig(
        deterministic=deterministic,
        max_batch_size=4,
        logits_post_processor_config=LogitsPostProcessorConfig({recorded.name: recorded}),
    )
    with Executor(engine_dir, config) as executor:
        end_id = executor.manifest.manifest.pretrained_config.eos_token_ids[0]
        for name, case in CASES.items():
            request = partial(
                Request,
                tokenizer.encode_chat([{"role": "user", "content": case.prompt}]),
                num_tokens,
                end_id=end_id,
                sampling_config=SamplingConfig(temperature=case.temperature, seed=1),
                output_config=OutputConfig(exclude_input_from_output=True, return_perf_metrics=True),
            )
            measured[name] = measure(executor, request, recorded, rounds)
    table = Table(
        *("prompt", "speed-up", "least", "tokens", "tokens / step", "acceptance"),
        title="prompt lookup, batch of one",
    )
    for name, result in measured.items():
        ratios = (f"{value:.2f}" for value in (result.tokens_per_iteration, result.acceptance_rate))
        speeds = (f"{value:.2f}" for value in (result.speed_up, result.least))
        table.add_row(name, *speeds, str(result.num_tokens), *ratios)
    console.print(table)
    if as_json:
        copying = statistics.geometric_mean(measured[name].speed_up for name, case in CASES.items() if case.copies)
        others = min(measured[name].speed_up for name, case in CASES.items() if not case.copies)
        cases = {name: result._asdict() for name, result in measured.items()}
        print(json.dumps({"speed_up_copy": copying, "floor_others": others, "cases": cases}))


def measure(executor: Executor, request: Callable[..., Request], recorded: Recorded, rounds: int) -> Measured:
    """Asks with and without, one after the other, each first in turn; the median of the rounds' ratios, which what else
    the machine does disturbs least."""
    first = request()
    _, answer = timed(executor, first)
    recorded.token_ids = first.input_token_ids + answer.output_token_ids[0]
    request = partial(request, logits_post_processor_name=recorded.name)
    ratios: list[float] = []
    for number in range(rounds + 1):
        if number % 2:
            drafted, result = timed(executor, request(lookahead_config=LOOKAHEAD))
            plain, expected = timed(executor, request())
        else:
            plain, expected = timed(executor, request())
            drafted, result = timed(executor, request(lookahead_config=LOOKAHEAD))
        assert result.output_token_ids == expected.output_token_ids == answer.output_token_ids
        if number > 0:  # the first round has not seen the prompts' ends
            ratios.append(plain / drafted)
    assert result.request_perf_metrics is not None
    return Measured(
        statistics.median(ratios),
        min(ratios),
        len(result.output_token_ids[0]),
        result.avg_decoded_tokens_per_iter,
        result.request_perf_metrics.speculative_decoding.acceptance_rate,
    )


def timed(executor: Executor, request: Request) -> tuple[float, Result]:
    """Seconds for each token, and what came of it."""
    started = time.perf_counter()
    (response,) = executor.await_responses(executor.enqueue_request(request))
    seconds = time.perf_counter() - started
    return seconds / len(response.result.output_token_ids[0]), response.result


if __name__ == "__main__":
    run(main, "scripts/bench_speculation")
