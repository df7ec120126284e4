"""Small tokenizers for tests, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Grüße aus Köln! Это тест. 你好,世界 🌍🚀",
    '{"name": "value", "numbers": [1, 2, 3], "nested": {"ok": true, "none": null}}',
    "END STOP ### Human: Assistant: <|user|> stop here",
    "One paragraph.\n\nAnother one.\n\n\n\nThe end.",
] * 4


def byte_level_tokenizer() -> FastTokenizer:
    """A byte-level BPE: three special tokens, the 256 bytes, and a few hundred merges."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def byte_fallback_tokenizer(*, strips_leading_space: bool) -> FastTokenizer:
    """SentencePiece style: pieces with U+2581 for a space, and the 256 byte tokens for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁quick", "the", "quick", "!", "é", "▁é", "a", "b", "▁▁"]
    tokenizer = FastTokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: FastTokenizer, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A tokenizer directory as `engine-build` writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 8,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return directory
