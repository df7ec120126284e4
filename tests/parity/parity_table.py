"""Prints docs/parity.md: for every chat prompt, where each engine's greedy text leaves transformers'."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from engine_build.checkpoint import open_checkpoint
from tests.conftest import DEMO_MODEL
from tests.parity.chat_prompts import chat_prompts, chat_token_ids
from tests.parity.oracle import Difference, Oracle
from tests.parity.smollm2 import NUM_TOKENS, Variant, build_smollm2, generate

VARIANTS = (
    Variant("reference", "float32"),
    Variant("openvino", "float32"),
    Variant("openvino", "bfloat16"),
    Variant("openvino", "bfloat16", "int8"),
)

INTRODUCTION = f"""# Parity with transformers

Greedy decoding of SmolLM2-135M-Instruct ({DEMO_MODEL.name}), {NUM_TOKENS} tokens for each of {{num_prompts}} chat
prompts (`tests/data/chat_prompts.json`), all prompts in flight at once. The oracle is transformers in float32 on the
same weights, read by its own GGUF reader, decoding one prompt at a time in an explicit loop: forward pass, argmax,
append.

A cell says at which generated token the text leaves the oracle's for the first time, and the oracle's best logit there
less its second best: how near the oracle itself was to the other token. "same" means that all {NUM_TOKENS} tokens are
equal. What follows a first difference is another text and is not compared.

Required (`tests/parity/test_smollm2_parity.py`): in float32 a first difference only where the margin is below 0.001, in
bfloat16 only where it is below 0.15. Weights rounded to 8 bits are other weights: that column is for information.

Written by `scripts/parity_table`: {{versions}}.
"""


def main() -> None:
    prompts = chat_token_ids(open_checkpoint(DEMO_MODEL))
    _note("reading the model with transformers")
    oracle = Oracle(DEMO_MODEL)
    expected = []
    for index, prompt in enumerate(prompts):
        _note(f"oracle: prompt {index + 1} of {len(prompts)}")
        expected.append(oracle.greedy(prompt, NUM_TOKENS))
    columns = []
    for variant in VARIANTS:
        _note(f"{variant}: building and generating")
        directory = Path(tempfile.mkdtemp(prefix="parity-"))
        try:
            generated = generate(DEMO_MODEL, build_smollm2(DEMO_MODEL, variant, directory / "engine"))
        finally:
            shutil.rmtree(directory)
        columns.append(
            [
                _compare(oracle, prompt, tokens, wanted)
                for prompt, tokens, wanted in zip(prompts, generated, expected, strict=True)
            ]
        )
    print(_markdown(chat_prompts(), columns))


def _compare(
    oracle: Oracle, prompt: Sequence[int], tokens: Sequence[int], expected: Sequence[int]
) -> Difference | None:
    """The first difference, found by the oracle's loop; its margin comes from a teacher-forced pass."""
    difference = oracle.first_difference(prompt, tokens)
    first = next((index for index in range(NUM_TOKENS) if tokens[index] != expected[index]), None)
    if first != (None if difference is None else difference.index):
        raise RuntimeError(f"the oracle's loop leaves the text at {first}, its teacher-forced pass says {difference}")
    return difference


def _markdown(prompts: Sequence[str], columns: Sequence[Sequence[Difference | None]]) -> str:
    packages = ("openvino", "transformers", "torch")
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    rows = ["| | prompt | " + " | ".join(map(str, VARIANTS)) + " |", "|--|--|" + "--|" * len(VARIANTS)]
    for index, prompt in enumerate(prompts):
        cells = ["same" if cell is None else f"{cell.index}: {cell.margin:.4f}" for cell in (c[index] for c in columns)]
        rows.append(f"| {index + 1} | {prompt.replace('|', chr(92) + '|')} | " + " | ".join(cells) + " |")
    summary = []
    for column in columns:
        margins = [cell.margin for cell in column if cell is not None]
        largest = f", largest margin {max(margins):.4f}" if margins else ""
        summary.append(f"{len(column) - len(margins)} of {len(column)} same{largest}")
    rows.append("| | **all** | " + " | ".join(summary) + " |")
    introduction = INTRODUCTION.format(num_prompts=len(prompts), versions=f"{platform.machine()}, {versions}")
    return introduction + "\n" + "\n".join(rows)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
