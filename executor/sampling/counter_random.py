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
_ALL_BITS = 2**64 - 1


def stream_start(seed: int, sequence_index: int) -> int:
    """The stream of a sequence, 64 bits. `seed` is an unsigned 64-bit integer."""
    return _mixed_integer(_mixed_integer(seed) + sequence_index * int(_STEP))


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


def _mixed_integer(value: int) -> int:
    """The same for one number; numpy would take longer."""
    value = (value + int(_STEP)) & _ALL_BITS
    value = ((value ^ (value >> 30)) * int(_MIX_1)) & _ALL_BITS
    value = ((value ^ (value >> 27)) * int(_MIX_2)) & _ALL_BITS
    return value ^ (value >> 31)
