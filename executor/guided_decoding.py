"""From a request's guide to its sampling: the guide is compiled off the loop, and the request waits meanwhile.

```
enqueue ──► compiler's threads ──► grammar ──► matcher for each sequence ──► loop releases the request
   └──────► BatchManager, held for its grammar ─────────────────────────────────────┘
```
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_build.engine_dir import EngineDirectory
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingConfig
from executor.sampling import SamplingSpec
from executor.sampling.guided import open_grammar_compiler
from executor.text import Tokenizer

if TYPE_CHECKING:
    from executor.sampling.grammar import CompiledGrammar
    from executor.sampling.grammar_compiler import GrammarCompiler


def can_guide(engine_dir: EngineDirectory) -> bool:
    """Whether grammars can be followed with an engine: it has a tokenizer and an end token, llguidance is installed."""
    if engine_dir.tokenizer_dir is None or importlib.util.find_spec("llguidance") is None:
        return False
    return bool(_end_token_ids(engine_dir, Tokenizer(engine_dir.tokenizer_dir)))


def open_guided_decoding(config: GuidedDecodingConfig, engine_dir: EngineDirectory, vocab_size: int) -> GrammarCompiler:
    """A compiler for the grammars of an engine directory's model.

    Raises:
        InvalidRequestError: `encoded_vocab` is not the directory's vocabulary, or a stop token is not in it.
        UnsupportedFeatureError: the directory has no tokenizer or no end token, or llguidance is not installed.
        TokenizerError: the directory's tokenizer cannot be used.
    """
    if engine_dir.tokenizer_dir is None:
        raise UnsupportedFeatureError(
            "guided_decoding_config needs an engine directory with a tokenizer; this one has none",
            field="guided_decoding_config",
        )
    tokenizer = Tokenizer(engine_dir.tokenizer_dir)
    if config.encoded_vocab is not None:
        _check_vocabulary(config.encoded_vocab, tokenizer)
    end_token_ids = config.stop_token_ids
    if end_token_ids is None:
        end_token_ids = _end_token_ids(engine_dir, tokenizer)
    for token_id in end_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"guided_decoding_config.stop_token_ids holds {token_id}; token ids are in [0, {vocab_size})",
                field="guided_decoding_config.stop_token_ids",
            )
    return open_grammar_compiler(tokenizer, vocab_size, end_token_ids)


def _end_token_ids(engine_dir: EngineDirectory, tokenizer: Tokenizer) -> list[int]:
    """Those that the model's configuration names, then the tokenizer's."""
    return list(dict.fromkeys((*engine_dir.model_config.eos_token_ids, *tokenizer.eos_token_ids)))


def _check_vocabulary(encoded_vocab: Sequence[str], tokenizer: Tokenizer) -> None:
    for token_id, token in enumerate(encoded_vocab):
        known = tokenizer.token_id(token)
        if known != token_id:
            raise InvalidRequestError(
                f"guided_decoding_config.encoded_vocab[{token_id}] is {token!r}; in the engine directory's tokenizer "
                f"{'there is no such token' if known is None else f'that is token {known}'}",
                field="guided_decoding_config.encoded_vocab",
            )


def with_grammar(specs: Sequence[SamplingSpec], grammar: Future[CompiledGrammar]) -> list[SamplingSpec]:
    """The specs of a request's sequences, each with a matcher of its own.

    Raises:
        RequestError: the guide is malformed, cannot be enforced, or nothing could end the output.
    """
    compiled = grammar.result()
    return [
        replace(
            spec,
            grammar=compiled.matcher(
                end_id=spec.end_id, stop_token_ids=spec.stop_token_ids, stop_words=spec.stop_words
            ),
        )
        for spec in specs
    ]
