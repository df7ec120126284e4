"""Tokens per second of one request with prompt-lookup speculation over without, alternating, by kind of prompt."""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, NamedTuple

import typer
from bench_engine import demo_engine
from rich.console import Console
from rich.table import Table

from executor import Executor, ExecutorConfig, LookaheadDecodingConfig, OutputConfig, Request
from executor.text import Tokenizer

LOOKAHEAD = LookaheadDecodingConfig(max_window_size=8, max_ngram_size=4, max_verification_set_size=8)
LIST = "apples, pears, plums, figs, dates, limes, grapes, melons, cherries, apricots, peaches, oranges, lemons"
CODE = """def total(prices, tax):
    result = 0.0
    for price in prices:
        result = result + price
    result = result * (1.0 + tax)
    return result
"""
ARTICLE = (
    "The river Avon rises in the hills north of the town and flows south for ninety miles. In spring the river Avon "
    "floods the meadows, and the meadows feed the herds through the summer. In autumn the mills along the river Avon "
    "grind the corn of four counties."
)
PROMPTS = {
    "copy": f"Repeat this list exactly, three times: {LIST}.",
    "code edit": f"Rewrite this function and rename `result` to `amount`, change nothing else:\n{CODE}",
    "summary with quotes": f"Quote every sentence that names the river, word for word:\n{ARTICLE}",
    "story": "Write a story about a lighthouse keeper who finds a letter in a bottle.",
    "explanation": "Explain how vaccines work to a ten-year-old.",
}
COPIES = ("copy", "code edit", "summary with quotes")


class Measured(NamedTuple):
    speed_up: float
    tokens_per_iteration: float
    is_same: bool


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One round of 64 tokens: under 50 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
    num_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt, the end id ignored.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times each prompt is asked, with and without.")] = 3,
    deterministic: Annotated[bool, typer.Option(help="Bit-equal logits, so that outputs must be equal.")] = True,
) -> None:
    """Measure on the CPU engine in bfloat16; deterministic mode makes the outputs comparable token for token."""
    if quick:
        num_tokens, rounds = 64, 1
    console = Console(stderr=as_json)
    engine_dir = demo_engine()
    tokenizer = Tokenizer(engine_dir / "tokenizer")
    measured = {}
    with Executor(engine_dir, ExecutorConfig(deterministic=deterministic, max_batch_size=4)) as executor:
        for name, text in PROMPTS.items():
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
            measured[name] = measure(executor, prompt, num_tokens, rounds)
    table = Table("prompt", "speed-up", "tokens / iteration", "same output", title="prompt lookup, batch of one")
    for name, result in measured.items():
        table.add_row(name, f"{result.speed_up:.2f}", f"{result.tokens_per_iteration:.2f}", str(result.is_same))
    console.print(table)
    if as_json:
        copying = statistics.geometric_mean(measured[name].speed_up for name in COPIES)
        others = min(result.speed_up for name, result in measured.items() if name not in COPIES)
        cases = {name: result._asdict() for name, result in measured.items()}
        print(json.dumps({"speed_up_copy": copying, "floor_others": others, "cases": cases}))


def measure(executor: Executor, prompt: list[int], num_tokens: int, rounds: int) -> Measured:
    plain, drafted = [], []
    outputs = set()
    per_iteration = 0.0
    for number in range(rounds + 1):
        for times, lookahead in ((plain, None), (drafted, LOOKAHEAD)):
            output = OutputConfig(exclude_input_from_output=True)
            request = Request(prompt, num_tokens, output_config=output, lookahead_config=lookahead)
            started = time.perf_counter()
            (response,) = executor.await_responses(executor.enqueue_request(request))
            if number > 0:  # the first round fills the prompt's cache
                times.append(time.perf_counter() - started)
            outputs.add(tuple(response.result.output_token_ids[0]))
            per_iteration = response.result.avg_decoded_tokens_per_iter
    return Measured(statistics.median(plain) / statistics.median(drafted), per_iteration, len(outputs) == 1)


if __name__ == "__main__":
    typer.run(main)
