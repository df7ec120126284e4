"""Compiles guides to grammars, off the executor's loop, and keeps those that were used last."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from executor.api.errors import InvalidRequestError, RequestError, UnsupportedFeatureError
from executor.api.guided import GuidedDecodingParams, GuideType
from executor.sampling.endless import check_lark_ends
from executor.sampling.grammar import CompiledGrammar, GrammarVocabulary
from executor.sampling.json_schema import parse_schema
from executor.sampling.masks import mask_words
from executor.sampling.structural_tag import structural_tag_to_lark
from executor.text import Tokenizer

_FIELD = "guided_decoding_params.guide"

_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""Whitespace between JSON tokens is free, but not endless, or a model may never come to the point."""

_MAX_GUIDE_BYTES = 100_000
"""Compiling can take quadratic time; a grammar of some megabytes would take minutes."""

_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""What these escapes mean to ECMA-262, and to llguidance in JSON schemas; in a regex it would take all of Unicode."""

_Key = tuple[GuideType, str | None]


class GrammarCompiler:
    """Thread-safe. Equal guides are compiled once, also while the first compilation is still going on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        num_threads: int = 2,
        cache_size: int = 256,
    ) -> None:
        """Begin; takes about half a second for a vocabulary of 49,152 tokens.

        Args:
            tokenizer: whose tokens the grammars are over.
            vocab_size: the model's vocabulary, which may be padded beyond the tokenizer's.
            end_token_ids: the model's end tokens, at least one.
            num_threads: compilations at a time.
            cache_size: grammars kept.

        Raises:
            UnsupportedFeatureError: the model has no end token, or llguidance cannot use its tokenizer.
        """
        if not end_token_ids:
            raise UnsupportedFeatureError(
                "guided decoding needs a model with an end token", field="guided_decoding_params"
            )
        try:
            self._ll_tokenizer = LLTokenizer(tokenizer.json, n_vocab=vocab_size, eos_token=list(end_token_ids))
        except ValueError as error:
            raise UnsupportedFeatureError(
                f"guided decoding cannot use this model's tokenizer: {error}", field="guided_decoding_params"
            ) from error
        self._tokenizer = tokenizer
        self._vocabulary = GrammarVocabulary(vocab_size, end_token_ids, tokenizer.special_token_ids)
        self._masks = LLExecutor()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-compiler")
        self._cache_size = cache_size
        self._cache: OrderedDict[_Key, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, params: GuidedDecodingParams) -> Future[CompiledGrammar]:
        """Begin to compile a guide, or find it. The future raises what `compile` raises."""
        key = (params.guide_type, params.guide)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known
            future = self._cache[key] = self._threads.submit(self._compile, params)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_failure(key, done))
        return future

    def compile(self, params: GuidedDecodingParams) -> CompiledGrammar:
        """Compile a guide, or find it; waits.

        Raises:
            InvalidRequestError: the guide is malformed or too complex: says where.
            UnsupportedFeatureError: it asks for something that cannot be enforced: names it.
        """
        return self.submit(params).result()

    def shutdown(self) -> None:
        """Stop the threads; compilations that wait are dropped."""
        self._threads.shutdown(cancel_futures=True)

    def _forget_failure(self, key: _Key, done: Future[CompiledGrammar]) -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._cache.get(key) is done:
                    del self._cache[key]

    def _compile(self, params: GuidedDecodingParams) -> CompiledGrammar:
        matcher = LLMatcher(self._ll_tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise _refusal("; ".join(warnings))
        # The first mask builds tables that all sequences then share.
        mask = np.zeros(mask_words(self._vocabulary.vocab_size), np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return CompiledGrammar(matcher, self._masks, self._vocabulary)

    def _grammar(self, params: GuidedDecodingParams) -> str:
        """llguidance's own form of a guide."""
        if params.guide_type is GuideType.JSON:
            return str(LLMatcher.grammar_from_json_schema("{}", overrides=_JSON_OPTIONS))
        if not params.guide:
            raise InvalidRequestError(f"{_FIELD} is empty; {params.guide_type.name} needs one", field=_FIELD)
        size = len(params.guide.encode("utf-8", "surrogatepass"))
        if size > _MAX_GUIDE_BYTES:
            raise InvalidRequestError(f"{_FIELD} has {size} bytes; at most {_MAX_GUIDE_BYTES} are taken", field=_FIELD)
        match params.guide_type:
            case GuideType.JSON_SCHEMA:
                schema = json.dumps(parse_schema(params.guide))
                return str(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
            case GuideType.REGEX:
                return str(LLMatcher.grammar_from_regex(_with_ascii_classes(params.guide)))
            case GuideType.EBNF_GRAMMAR:
                lark = _lark(params.guide)
                check_lark_ends(lark)
                return str(LLMatcher.grammar_from_lark(lark))
            case GuideType.STRUCTURAL_TAG:
                lark = structural_tag_to_lark(params.guide, self._special_token)
                return str(LLMatcher.grammar_from_lark(lark))
        raise UnsupportedFeatureError(
            f"guided_decoding_params.guide_type is {params.guide_type!r}; offered are {[t.name for t in GuideType]}",
            field="guided_decoding_params.guide_type",
        )

    def _special_token(self, text: str) -> int | None:
        token_id = self._tokenizer.token_id(text)
        return token_id if token_id in self._vocabulary.special_token_ids else None


def _with_ascii_classes(regex: str) -> str:
    """The same regex with digits and word characters spelled out; brackets may stand in brackets there."""
    return re.sub(r"\\(.)", lambda escape: _ASCII_CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def _lark(guide: str) -> str:
    """Lark from GBNF (`root ::= ...`), the form that upstream takes; Lark itself is taken as it is."""
    try:
        lark: str = any_to_lark(guide)
    except Exception as error:  # the converter raises whatever its parser stumbles over
        raise InvalidRequestError(f"{_FIELD} is not a grammar: {error}", field=_FIELD) from error
    return lark


_NOTHING_FITS = "NoExtensionBias"
"""What llguidance says of a grammar that no token can begin, as one that only refers to itself."""


def _refusal(message: str) -> RequestError:
    """llguidance's complaint as a typed error, without the dump of its parser's state that may follow it."""
    complaint = message.partition("\n<state>")[0].strip()
    if complaint == _NOTHING_FITS:
        complaint = "no text follows it"
    text = f"{_FIELD} is refused: {complaint}"
    if "not supported" in message or "Unimplemented" in message:
        return UnsupportedFeatureError(text, field=_FIELD)
    return InvalidRequestError(text, field=_FIELD)
