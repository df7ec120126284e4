"""What the sampler is given and what it gives back.

```
logits      | r0 | r1 r1 r1 | r2 |          S rows of float32 [vocab_size]
SampledRows  r0: first_row 0, num_rows 1
             r1: first_row 1, num_rows 3    two drafts: rows follow the last token, draft 0, draft 1
             r2: first_row 4, num_rows 1
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from executor.api.errors import InvalidRequestError, RequestError
from executor.api.sampling_config import SamplingConfig
from executor.sampling.processors import check_processor

LogitsProcessor = Callable[..., None]
"""`(request_id, logits [1, 1, vocab], token ids [[...]], stream, client_id)`: changes the logits in place.

`client_id` is left out for a callable that takes four arguments. `stream` is always `None`: there is no device
stream to wait for. The logits are a torch tensor where torch is installed, else a numpy array; both share the
sampler's memory.
"""

BatchedLogitsProcessor = Callable[..., None]
"""`(request ids, [logits [1, 1, vocab]], [token ids [[...]]], stream, client ids)`: one call for all rows of a step
whose requests name the same callable."""


class GrammarMatcher(Protocol):
    """Where one sequence is in its grammar. Made by `executor.sampling.grammar.CompiledGrammar.matcher`."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow generated tokens; raises `SamplingError` for a token that the grammar does not allow here."""
        ...

    def fill_masks(self, masks: NDArray[np.uint32], draft_token_ids: Sequence[int]) -> None:
        """Write which tokens are allowed after 0, 1, ... drafts, and stay where it is.

        Args:
            masks: `[1 + drafts, ceil(vocab_size / 32)]`; token t is bit `t % 32` of word `t // 32`. Rows after a
                draft that the grammar does not allow, or that ends the output, need not be written: they are never
                reached.
            draft_token_ids: the drafts.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How the tokens of one sequence are drawn."""

    config: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_token_ids: Sequence[int] = ()
    end_id: int | None = None
    """Masked before `config.min_tokens` generated tokens; `None` where no token ends the output."""
    stop_token_ids: Sequence[int] = ()
    """Masked like the end id."""
    stop_words: Sequence[Sequence[int]] = ()
    """Token sequences that end the output; like the end id, they are not completed before `config.min_tokens`."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that are never completed."""
    embedding_bias: NDArray[np.float32] | None = None
    """float32 `[vocab_size]`, added to the logits."""
    num_top_log_probs: int = 0
    return_log_probs: bool = False
    return_generation_logits: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    batched_logits_processor: BatchedLogitsProcessor | None = None
    grammar: GrammarMatcher | None = None
    sequence_index: int = 0
    """Which of `num_return_sequences` this is: independent draws from one seed."""
    client_id: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first field that no sampler of `vocab_size` tokens can follow."""
        self.config.validate()
        if self.end_id is not None:
            _check_token_ids("end_id", (self.end_id,), vocab_size)
        _check_token_ids("prompt_token_ids", self.prompt_token_ids, vocab_size)
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for name, words in (("bad_words", self.bad_words), ("stop_words", self.stop_words)):
            for word in words:
                if len(word) == 0:
                    raise InvalidRequestError(f"{name} holds an empty sequence", field=name)
                _check_token_ids(name, word, vocab_size)
        if self.config.top_p_reset_ids is not None:
            _check_token_ids("sampling_config.top_p_reset_ids", (self.config.top_p_reset_ids,), vocab_size)
        if self.embedding_bias is not None:
            shape = np.shape(self.embedding_bias)
            if shape != (vocab_size,):
                raise InvalidRequestError(
                    f"embedding_bias has shape {list(shape)}; it must be [{vocab_size}], one number a token",
                    field="embedding_bias",
                )
            if not np.isfinite(self.embedding_bias).all():
                raise InvalidRequestError(
                    "embedding_bias holds a number that is not finite; ban tokens with bad_words instead",
                    field="embedding_bias",
                )
        for call in self.logits_processors:
            check_processor(call, "logits_post_processor")
        if self.batched_logits_processor is not None:
            check_processor(self.batched_logits_processor, "logits_post_processor_name")
        if not 0 <= self.num_top_log_probs <= vocab_size:
            raise InvalidRequestError(
                f"num_top_log_probs is {self.num_top_log_probs}; it must be in [0, {vocab_size}]",
                field="num_top_log_probs",
            )
        if self.sequence_index < 0:
            raise InvalidRequestError(
                f"sequence_index is {self.sequence_index}; it must be 0 or more", field="sequence_index"
            )


class SampledRows(NamedTuple):
    """One request's rows of a step's logits."""

    request_id: int
    token_ids: Sequence[int]
    """Prompt and generated tokens so far. Between calls it only grows."""
    draft_token_ids: Sequence[int]
    first_row: int
    num_rows: int
    """`1 + len(draft_token_ids)`: row j is the distribution after j accepted drafts."""


TopLogProbs = list[tuple[int, float]]
"""(token id, log probability), most likely first."""


@dataclass(slots=True)
class SampledSequence:
    """What a step drew for one request. With k drafts that is 1 to 1 + k tokens: the drafts that the draws confirmed,
    then the first draw that differs, ends the output, or comes after the last draft."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    """Of each token, where asked for: natural logarithm of its probability under the softmax of the raw logits."""
    top_log_probs: list[TopLogProbs] | None = None
    generation_logits: NDArray[np.float32] | None = None
    """Raw logits, `[len(token_ids), vocab_size]`, a copy."""
    error: RequestError | None = None
    """Why nothing more can be drawn; `token_ids` then holds what was drawn before, maybe nothing."""


def _check_token_ids(name: str, token_ids: Any, vocab_size: int) -> None:
    ids = np.asarray(token_ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InvalidRequestError(f"{name} holds token id {wrong[0]}; it must be in [0, {vocab_size})", field=name)
