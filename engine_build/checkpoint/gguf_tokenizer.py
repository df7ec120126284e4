"""A tokenizer in Hugging Face's formats, rebuilt from a GGUF file's metadata.

Two kinds of vocabulary occur in models of the Llama family, both byte-pair encodings:

- `gpt2`, byte-level: text is cut by a pattern, which the metadata only names (`tokenizer.ggml.pre`), then merged.
- `llama`, SentencePiece: text is merged whole, spaces written as `▁`, what is not in the vocabulary as bytes. The file
  has no merges, only a score for each token; the merges are recovered from these.

Pattern names and token types are those of llama.cpp's vocabulary loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine_build.checkpoint.gguf_file import GgufFile
from engine_build.checkpoint.interface import CheckpointError, TokenizerFiles

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "falcon3": _LLAMA3_PATTERN,
    "tekken": _TEKKEN_PATTERN,
    "qwen2": _QWEN2_PATTERN,
    "deepseek-r1-qwen": _QWEN2_PATTERN,
}
"""Cut by a pattern of their own."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
"""Every digit alone, the rest cut as GPT-2 does."""
_GPT2 = ("gpt-2", "gpt2")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""A piece that is a token is taken as it is, even where merging would not have arrived at it."""

_SPACE = "▁"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(file: GgufFile) -> TokenizerFiles:
    """Rebuild the tokenizer; empty when the file has none at all.

    Raises:
        CheckpointError: the file has a tokenizer of another kind, or a damaged one.
    """
    if "tokenizer.ggml.model" not in file:
        return TokenizerFiles()
    model = file.string("tokenizer.ggml.model")
    tokens = file.strings("tokenizer.ggml.tokens")
    types = _token_types(file, tokens)
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens names a token twice")
    if model == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(file, tokens, types)
    else:
        raise CheckpointError(f"{file.path}: tokenizer {model!r} is not supported; supported are 'gpt2' and 'llama'")
    _add_whole_tokens(tokenizer, tokens, types)
    config = _tokenizer_config(file, tokens, sentencepiece=model == "llama")
    _add_template(tokenizer, config, tokens)
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
    if "tokenizer.chat_template" in file:
        files["chat_template.jinja"] = file.string("tokenizer.chat_template").encode()
    return TokenizerFiles(files)


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    variant = file.string("tokenizer.ggml.pre")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens),
            merges=_stored_merges(file, tokens),
            ignore_merges=variant in _WHOLE_WORDS,
        )
    )
    if variant in _PATTERNS:
        cut: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(_PATTERNS[variant]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif variant in _SINGLE_DIGITS:
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif variant in _GPT2:
        cut = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        known = sorted((*_PATTERNS, *_SINGLE_DIGITS, *_GPT2))
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {variant!r} is not supported; supported are {', '.join(known)}"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(file: GgufFile, tokens: Sequence[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise CheckpointError(f"{file.path}: merge {merge!r} is of tokens that are not in the vocabulary")
        merges.append((left, right))
    return merges


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = [float(score) for score in file.numbers("tokenizer.ggml.scores")]
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    mergeable = {
        token: score for token, score, type_ in zip(tokens, scores, types, strict=True) if type_ == TokenType.NORMAL
    }
    unknown = tokens[_token_id(file, "unknown", tokens, default=0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens),
            merges=merges_from_scores(mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    after_merging = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.boolean("tokenizer.ggml.add_space_prefix", True):
        # Before every stretch of text between special tokens, as SentencePiece's own encoder and llama.cpp do.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        after_merging.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(after_merging)
    return tokenizer


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that make byte-pair encoding choose as SentencePiece does: the best scored result first.

    Every way to cut a token into two tokens is a merge.

    Args:
        scores: token -> score, of the tokens that text may be merged into.
    """
    ranked = [
        (-score, token, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: id_ for id_, token in enumerate(tokens)}


def _token_types(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    types = [int(type_) for type_ in file.numbers("tokenizer.ggml.token_type")]
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    return types


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in text before anything is cut: control tokens, and user-defined ones, which are text."""
    typed = list(zip(tokens, types, strict=True))
    control = [token for token, type_ in typed if type_ in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user_defined = [token for token, type_ in typed if type_ == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _tokenizer_config(file: GgufFile, tokens: Sequence[str], *, sentencepiece: bool) -> dict[str, object]:
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for key, name in names.items():
        if f"tokenizer.ggml.{name}_token_id" in file:
            config[key] = tokens[_token_id(file, name, tokens)]
    adds_begin = sentencepiece or file.string("tokenizer.ggml.pre", "") in _WHOLE_WORDS
    config["add_bos_token"] = file.boolean("tokenizer.ggml.add_bos_token", adds_begin)
    config["add_eos_token"] = file.boolean("tokenizer.ggml.add_eos_token", False)
    return config


def _token_id(file: GgufFile, name: str, tokens: Sequence[str], default: int | None = None) -> int:
    key = f"tokenizer.ggml.{name}_token_id"
    id_ = file.integer(key, default)
    if not 0 <= id_ < len(tokens):
        raise CheckpointError(f"{file.path}: {key} is {id_}, the vocabulary has {len(tokens)} tokens")
    return id_


def _add_template(tokenizer: Tokenizer, config: dict[str, object], tokens: Sequence[str]) -> None:
    """Begin and end tokens that are put around every text."""
    begin = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    end = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    around = [str(token) for token in (*begin, *end)]
    if around:
        ids = _vocabulary(tokens)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*map(str, begin), "$A", *map(str, end)],
            special_tokens=[(token, ids[token]) for token in dict.fromkeys(around)],
        )
