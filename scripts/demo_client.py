"""Send eight chat prompts at once to a server, show the answers as they come, and what the server's iterations did.

    .venv/bin/python scripts/demo_client.py 127.0.0.1:50051

Prints the answers, the iteration table, and one line: tokens per second, time to first token, requests per
iteration. Exits with 1 when an answer is missing or empty, with 2 when there is no server.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from one_line_parser import OneLineParser
from rich.console import Console

from executor.api.errors import RequestError
from executor.cli.answers import AnswerView, answer_view
from executor.cli.table import iteration_table, requests_per_iteration, write_csv
from executor.client import AsyncInferenceClient, ChatMessage, Delta, Finished
from executor.client.errors import CallError

PROMPTS = [
    "What is the capital of France?",
    "Name three fruits that are yellow.",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about rain.",
    "How many days are there in a leap year, and why?",
    "Give me a simple recipe for pancakes.",
    "Translate into Spanish: Good morning, my friend.",
    "What does a compiler do?",
]
CONNECT_SECONDS = 10.0


@dataclass
class Answer:
    """One answer, and when its first token came."""

    text: str = ""
    num_tokens: int = 0
    seconds_to_first_token: float | None = None
    finish_reason: str = ""

    @property
    def is_good(self) -> bool:
        return bool(self.finish_reason) and bool(self.text.strip())


async def ask(client: AsyncInferenceClient, index: int, prompt: str, max_tokens: int, view: AnswerView) -> Answer:
    """Stream one answer into the view."""
    answer = Answer()
    started = time.perf_counter()
    with client.generate([ChatMessage("user", prompt)], max_tokens=max_tokens) as generation:
        async for event in generation:
            if isinstance(event, Delta):
                if answer.seconds_to_first_token is None:
                    answer.seconds_to_first_token = time.perf_counter() - started
                answer.text += event.text
                view.add(index, event.text)
            elif isinstance(event, Finished):
                answer.num_tokens = event.usage.completion_tokens
                answer.finish_reason = event.finish_reason.name
                view.finish(index, f"{answer.finish_reason}, {answer.num_tokens} tokens")
    return answer


async def run(target: str, prompts: list[str], max_tokens: int, table_csv: Path | None, console: Console) -> int:
    async with AsyncInferenceClient(target) as client:
        model = await client.model_info(timeout=CONNECT_SECONDS)
        console.print(f"{len(prompts)} prompts at once to {model.name} at {target}\n")
        first_iteration = await next_iteration(client)
        started = time.perf_counter()
        with answer_view(console, prompts) as view:
            answers = await asyncio.gather(
                *(ask(client, index, prompt, max_tokens, view) for index, prompt in enumerate(prompts)),
                return_exceptions=True,
            )
        seconds = time.perf_counter() - started
        rows = await client.iteration_table(first_iteration, timeout=CONNECT_SECONDS)

    console.print(iteration_table(rows))
    if table_csv is not None:
        write_csv(rows, table_csv)
    good = [answer for answer in answers if isinstance(answer, Answer) and answer.is_good]
    for index, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            console.print(f"[{index}] failed: {answer}", markup=False)
        elif not answer.is_good:
            console.print(f"[{index}] the answer is missing or empty", markup=False)
    if good:
        num_tokens = sum(answer.num_tokens for answer in good)
        first_token = median(answer.seconds_to_first_token or 0.0 for answer in good)
        console.print(
            f"{len(good)} of {len(prompts)} answers: {num_tokens / seconds:.1f} tokens/s, "
            f"{1000 * first_token:.0f} ms to first token (median), "
            f"{requests_per_iteration(rows):.2f} requests per iteration",
            highlight=False,
            soft_wrap=True,
        )
    return 0 if len(good) == len(prompts) else 1


async def next_iteration(client: AsyncInferenceClient) -> int:
    """The first iteration that the server has not recorded yet."""
    rows = await client.iteration_table(timeout=CONNECT_SECONDS)
    return rows[-1].iteration + 1 if rows else 0


def main() -> int:
    parser = OneLineParser(
        prog="scripts/demo_client.py", description="Send eight chat prompts at once to a server and stream the answers."
    )
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--max_tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--table_csv", type=Path, help="write the iteration table, every row, to this file")
    arguments = parser.parse_args()
    try:
        return asyncio.run(run(arguments.target, PROMPTS, arguments.max_tokens, arguments.table_csv, Console()))
    except (CallError, RequestError) as error:
        print(f"error: {arguments.target}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
