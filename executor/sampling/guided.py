"""The way to guided decoding, whose library is an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor.api.errors import UnsupportedFeatureError
from executor.text import Tokenizer

if TYPE_CHECKING:
    from executor.sampling.grammar_compiler import GrammarCompiler


def open_grammar_compiler(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> GrammarCompiler:
    """A compiler for a model's grammars; arguments and errors as for `GrammarCompiler`.

    Raises:
        UnsupportedFeatureError: llguidance is not installed.
    """
    try:
        from executor.sampling.grammar_compiler import GrammarCompiler
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "llguidance":
            raise
        raise UnsupportedFeatureError(
            "guided decoding needs llguidance: pip install 'inflight-executor[guided]'",
            field="guided_decoding_params",
        ) from error
    return GrammarCompiler(tokenizer, vocab_size, end_token_ids)
