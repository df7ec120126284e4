"""What a request wants to know of its prompt: logits or log probabilities at each position, collected chunk by chunk.

```
prompt      t0   t1   t2   t3   t4
logits of   t0   t1 | t2   t3   t4        two chunks; row i is what the model expects after t0 .. ti
log probs        t1   t2   t3   t4        of t1 in row 0, of t2 in row 1, ...
```
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ContextLogits:
    """Collects for one sequence. Its prompt must be computed from the first token on, in order."""

    __slots__ = ("_prompt", "log_probs", "logits", "num_collected")

    def __init__(
        self, prompt_token_ids: Sequence[int], vocab_size: int, *, wants_logits: bool, wants_log_probs: bool
    ) -> None:
        self._prompt = np.asarray(prompt_token_ids, np.int64)
        self.num_collected = 0
        """Positions so far."""
        self.logits: NDArray[np.float32] | None = None
        """`[prompt tokens, vocab]`, filled up to `num_collected`; `None` where only log probabilities are wanted."""
        self.log_probs: list[float] | None = [] if wants_log_probs else None
        """Of the prompt's second token on, as far as collected."""
        if wants_logits:
            self.logits = np.empty((len(self._prompt), vocab_size), np.float32)

    @property
    def is_complete(self) -> bool:
        return self.num_collected == len(self._prompt)

    def add(self, start: int, logits: NDArray[np.float32]) -> None:
        """Take in `logits` `[rows, vocab]` of positions `start` on; those known already, or behind the prompt, are
        passed over.

        Raises:
            ValueError: positions before `start` are missing.
        """
        if start > self.num_collected:
            raise ValueError(f"logits of positions {self.num_collected} to {start - 1} of the prompt are missing")
        first = self.num_collected - start
        new = logits[first : max(first, len(self._prompt) - start)]
        begin, end = self.num_collected, self.num_collected + len(new)
        if self.logits is not None:
            self.logits[begin:end] = new
        if self.log_probs is not None:
            following = self._prompt[begin + 1 : end + 1]
            self.log_probs += [_log_prob(row, token_id) for row, token_id in zip(new, following, strict=False)]
        self.num_collected = end


def _log_prob(logits: NDArray[np.float32], token_id: int) -> float:
    """Of one token, under the softmax of a row. The normaliser is summed in float64."""
    largest = logits.max()
    return float(logits[token_id] - largest - np.log(np.exp(logits - largest).sum(dtype=np.float64)))
