"""Random numbers that are a function of where they are used, not of when.

Each sequence has a stream, fixed by (seed, sequence index); the number for a position is the SplitMix64 output of the
stream's start plus `position` steps (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). So a
position draws the same number alone, in a batch, after a pause, and when it is reached by a draft.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_start(seed: int, sequence_index: int) -> np.uint64:
    """The stream of a sequence. `seed` is an unsigned 64-bit integer."""
    starts = _mixed(_mixed(np.array([seed], np.uint64)) + np.array([sequence_index], np.uint64) * _STEP)
    return np.uint64(starts[0])


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), 53 bits each, for one position of each stream: `[n]` and `[n]` to `[n]`."""
    bits = _mixed(starts + positions.astype(np.uint64) * _STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64 bits."""
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
