"""Rotary frequency scaling, as a GGUF file says it: in metadata (linear) or as a tensor of divisors (Llama 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.gguf_file import GgufFile
from engine_build.checkpoint.gguf_tensors import decode
from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.model_config import RopeScaling

_LLAMA3_TOLERANCE = 1e-5
"""Relative; the file holds float32 divisors."""


def rope_scaling(file: GgufFile, divisors_name: str, head_size: int) -> RopeScaling | None:
    """The scaling of a `llama` model, or `None`.

    Raises:
        CheckpointError: a kind of scaling that the network cannot do.
    """
    if divisors_name in file.tensors:
        info = file.tensors[divisors_name]
        divisors = decode(file.rows(divisors_name), info.type, info.shape).to_float32()
        return _llama3_scaling(file, divisors_name, divisors, head_size)
    factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 1.0))
    kind = file.string("llama.rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind != "linear":
        raise CheckpointError(
            f"{file.path}: rotary scaling {kind!r} is not supported; supported are 'none', 'linear' and Llama 3's"
        )
    if factor <= 0:
        raise CheckpointError(f"{file.path}: llama.rope.scaling.factor is {factor}, it must be positive")
    return RopeScaling(kind="linear", factor=factor)


def _llama3_scaling(file: GgufFile, divisors_name: str, divisors: NDArray[np.float32], head_size: int) -> RopeScaling:
    """The parameters behind the divisors: Llama 3.1 and 3.2 differ in the factor alone, which is the largest divisor.

    The divisors are computed again from what was found and compared, so another recipe is refused, not approximated.
    """
    scaling = RopeScaling(
        kind="llama3",
        factor=float(np.max(divisors)),
        original_max_position_embeddings=file.integer("llama.rope.scaling.original_context_length", 8192),
    )
    expected = llama3_divisors(scaling, file.number("llama.rope.freq_base", 10_000.0), head_size)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=_LLAMA3_TOLERANCE, atol=0):
        raise CheckpointError(
            f"{file.path}: {divisors_name} does not hold Llama 3's rotary scaling (low and high frequency factor 1 "
            f"and 4, original context {scaling.original_max_position_embeddings}); no other recipe is supported"
        )
    return scaling


def llama3_divisors(scaling: RopeScaling, rope_theta: float, head_size: int) -> NDArray[np.float64]:
    """What each rotary frequency is divided by, `[head_size // 2]`.

    Frequencies that turn more than `high_freq_factor` times within the original context stay, those that turn less
    than `low_freq_factor` times are divided by `factor`, those between are interpolated. Source: the Llama 3.1 release.
    """
    frequencies = rope_theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (kept + (1.0 - kept) / scaling.factor))
