"""The chat prompts of `tests/data/chat_prompts.json` as token ids of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

from engine_build.checkpoint.interface import Checkpoint

CHAT_PROMPTS_FILE = Path(__file__).parent.parent / "data" / "chat_prompts.json"


def chat_prompts() -> list[str]:
    prompts: list[str] = json.loads(CHAT_PROMPTS_FILE.read_text(encoding="utf-8"))
    return prompts


def chat_token_ids(checkpoint: Checkpoint) -> list[list[int]]:
    """Each prompt as one user message through the checkpoint's chat template, ready for the assistant's answer."""
    files = checkpoint.tokenizer_files().files
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        files["chat_template.jinja"].decode("utf-8")
    )
    texts = [
        template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        for prompt in chat_prompts()
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
