"""Applies token masks to rows of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LIMITS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.inf, -np.inf).astype(np.float32)
"""[256, 8]: for each byte of a mask the upper limits of eight logits."""


class MaskApplier:
    """Holds the scratch row that expanding a mask takes."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._limits = np.empty((mask_words(vocab_size) * 4, 8), np.float32)

    def apply(self, row: NDArray[np.float32], mask: NDArray[np.uint32]) -> None:
        """Set to -inf what `mask` `[ceil(vocab / 32)]` does not allow in `row` `[vocab]`. NaN stays NaN."""
        np.take(_LIMITS, mask.view(np.uint8), axis=0, out=self._limits, mode="clip")
        np.minimum(row, self._limits.reshape(-1)[: self._vocab_size], out=row)


def mask_words(vocab_size: int) -> int:
    """32-bit words of one mask."""
    return -(-vocab_size // 32)
