"""Measures the sampler: options x milliseconds, and what every option together adds to a decode step.

The logits look like a language model's: most tokens far below a few likely ones. With `--engine_dir` three things are
done in turns at the same number of rows: a decode step of that engine alone, the same step with everything prepared
beside it and drawn after it, as the Executor does, and the options of the table.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from engine_build.command_line import run
from executor.api.guided import GuidedDecodingParams, GuideType
from executor.api.sampling_config import SamplingConfig
from executor.engines.interface import Engine, PendingLogits, StepInputs
from executor.engines.open import open_engine
from executor.sampling import SampledRows, Sampler, SamplingSpec
from executor.sampling.grammar_compiler import CompiledGrammar, GrammarCompiler
from executor.text import Tokenizer

HISTORY = 512
"""Tokens of each sequence before the first measured step."""
ENGINE_HISTORY = 150
EVERYTHING = "everything"

_DRAW = {"temperature": 0.8, "seed": 1}
_FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.02}
_DECAY = {"top_p_decay": 0.99, "top_p_min": 0.5, "top_p_reset_ids": 11}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
_BANS = {"no_repeat_ngram_size": 4, "min_tokens": 2000}
_BAD_WORDS = [[17], [400, 401], [9, 10, 11]]


def options(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Fields of `SamplingConfig` and `SamplingSpec` by the name of the row that measures them."""
    sparse = np.zeros(vocab_size, np.float32)
    sparse[:: vocab_size // 100] = 0.5
    log_probs = {"return_log_probs": True, "num_top_log_probs": 5}
    words = {"bad_words": _BAD_WORDS, "end_id": 2, "stop_token_ids": [5], "stop_words": [[6, 7]]}
    everything = _DRAW | _FILTERS | _DECAY | _PENALTIES | _BANS | words | log_probs | {"embedding_bias": sparse}
    return {
        "greedy": {},
        "temperature": _DRAW,
        "top-k 50": _DRAW | {"top_k": 50},
        "top-p 0.95": _DRAW | {"top_p": 0.95},
        "min-p 0.02": _DRAW | {"min_p": 0.02},
        "top-k, top-p, min-p": _DRAW | _FILTERS,
        "decaying top-p": _DRAW | _FILTERS | _DECAY,
        "three penalties": _PENALTIES,
        "no repeated 4-gram": {"no_repeat_ngram_size": 4},
        "words, minimum length": words | {"min_tokens": 2000},
        "bias of 100 tokens": {"embedding_bias": sparse},
        "bias of all tokens": {"embedding_bias": np.linspace(-1, 1, vocab_size, dtype=np.float32)},
        "log probs, top 5": log_probs,
        "generation logits": {"return_generation_logits": True},
        EVERYTHING: everything,
    }


def spec(fields: dict[str, Any], prompt: list[int], index: int, grammar: CompiledGrammar | None) -> SamplingSpec:
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    return SamplingSpec(
        config=SamplingConfig(**{name: value for name, value in fields.items() if name in names}),
        prompt_token_ids=prompt,
        sequence_index=index,
        grammar=None if grammar is None else grammar.matcher(end_id=2),
        **{name: value for name, value in fields.items() if name not in names},
    )


class Measured:
    """A sampler of its own, with `rows` sequences that grow by a token a step."""

    def __init__(self, vocab_size: int, rows: int, fields: dict[str, Any], grammar: CompiledGrammar | None) -> None:
        generator = np.random.default_rng(7)
        self._sampler = Sampler(vocab_size)
        self._tokens: list[list[int]] = []
        self.seconds: list[float] = []
        """Of whole steps."""
        self.seconds_after: list[float] = []
        """Of what is done once there are logits."""
        for index in range(rows):
            # Words of a text repeat: about 300 different tokens of 512.
            prompt = np.minimum(generator.zipf(1.3, HISTORY), vocab_size - 1).tolist()
            self._sampler.open(index, spec(fields, prompt, index, grammar))
            self._tokens.append(prompt)

    def step(self, submit: Callable[[], PendingLogits]) -> None:
        sequences = [SampledRows(index, tokens, [], index, 1) for index, tokens in enumerate(self._tokens)]
        started = time.perf_counter()
        pending = submit()
        prepared = self._sampler.prepare(sequences)
        logits = pending()
        has_logits = time.perf_counter()
        results = self._sampler.draw(logits, prepared)
        ended = time.perf_counter()
        self.seconds.append(ended - started)
        self.seconds_after.append(ended - has_logits)
        for tokens, result in zip(self._tokens, results, strict=True):
            if result.error is not None:
                raise result.error
            tokens += result.token_ids


def model_like_logits(rows: int, vocab_size: int) -> NDArray[np.float32]:
    """Most tokens around 0 with a deviation of 2.5, and a few likely ones 8 to 20 above."""
    generator = np.random.default_rng(3)
    logits = generator.standard_normal((rows, vocab_size)).astype(np.float32) * 2.5
    for row in logits:
        likely = generator.integers(0, vocab_size, 40)
        row[likely] = np.sort(generator.gamma(2.0, 3.0, 40)).astype(np.float32) + 6
    return logits


def decode_step(engine: Engine, rows: int) -> Callable[[], PendingLogits]:
    """A step of `rows` sequences that each have `ENGINE_HISTORY` tokens in the pool."""
    blocks = -(-(ENGINE_HISTORY + 1) // engine.spec.tokens_per_block)
    begins = np.arange(rows + 1, dtype=np.int32)
    inputs = StepInputs(
        input_ids=np.full(rows, 7, np.int64),
        position_ids=np.full(rows, ENGINE_HISTORY, np.int64),
        past_lens=np.full(rows, ENGINE_HISTORY, np.int32),
        subsequence_begins=begins,
        block_indices=np.arange(rows * blocks, dtype=np.int32),
        block_indices_begins=begins * np.int32(blocks),
        sampled_rows=np.arange(rows, dtype=np.int64),
    )
    return lambda: engine.submit(inputs)


def main(
    engine_dir: Annotated[Path | None, typer.Option("--engine_dir", help="Measure a decode step of it.")] = None,
    rows: Annotated[int, typer.Option(help="Sequences in the step.")] = 64,
    vocab_size: Annotated[int, typer.Option(help="Without an engine.")] = 49_152,
    quick: Annotated[bool, typer.Option("--quick", help="60 steps instead of 100.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
) -> None:
    """Print the median of each row; `share_of_step` is what every option together adds to a step, null without an
    engine."""
    console = Console()
    engine: Engine | None = None
    rows_of_table: dict[str, dict[str, Any]]
    grammar: CompiledGrammar | None = None
    if engine_dir is not None:
        blocks = -(-(ENGINE_HISTORY + 1) // 16) * rows
        engine = open_engine(engine_dir, num_blocks=blocks)
        engine.warm_up()
        vocab_size = engine.spec.vocab_size
        tokenizer = Tokenizer(engine_dir / "tokenizer")
        compiler = GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
        grammar = compiler.compile(GuidedDecodingParams(GuideType.REGEX, "[a-z ,.]*"))
        compiler.shutdown()
    rows_of_table = options(vocab_size)
    measured = {name: Measured(vocab_size, rows, fields, None) for name, fields in rows_of_table.items()}
    if grammar is not None:
        measured["grammar"] = Measured(vocab_size, rows, _DRAW | {"top_k": 50}, grammar)

    raw = model_like_logits(rows, vocab_size)
    logits = np.empty_like(raw)
    submit = None if engine is None else decode_step(engine, rows)
    step_seconds: list[float] = []
    beside_step = Measured(vocab_size, rows, rows_of_table[EVERYTHING], None)
    for _ in range(60 if quick else 100):
        if submit is not None:
            started = time.perf_counter()
            submit()()
            step_seconds.append(time.perf_counter() - started)
            beside_step.step(submit)
        for one in measured.values():
            np.copyto(logits, raw)
            one.step(lambda: lambda: logits)

    milliseconds = {name: median(one.seconds) * 1e3 for name, one in measured.items()}
    table = Table(title=f"{rows} rows of {vocab_size} logits, median of {len(measured[EVERYTHING].seconds)}")
    table.add_column("option")
    table.add_column("ms", justify="right")
    for name, value in milliseconds.items():
        table.add_row(name, f"{value:.2f}")
    step_ms = with_everything_ms = after_ms = share = None
    if step_seconds:
        step_ms = median(step_seconds) * 1e3
        with_everything_ms = median(beside_step.seconds) * 1e3
        after_ms = median(beside_step.seconds_after) * 1e3
        share = with_everything_ms / step_ms - 1
        table.add_row("a decode step of the engine", f"{step_ms:.1f}", style="bold")
        table.add_row("the same with everything, prepared beside it", f"{with_everything_ms:.1f}")
        table.add_row("of that, after the step", f"{after_ms:.2f}")
    console.print(table)
    console.print(f"share of a step: {'not measured (no --engine_dir)' if share is None else f'{share:.1%}'}")
    if as_json:
        figures = {"step_ms": step_ms, "step_with_everything_ms": with_everything_ms, "after_step_ms": after_ms}
        print(json.dumps({"rows": rows, "ms": milliseconds, **figures, "share_of_step": share}))


if __name__ == "__main__":
    run(main, "scripts/bench_sampling")
