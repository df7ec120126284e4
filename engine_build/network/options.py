"""What can be chosen about a network, beyond what the checkpoint says."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
WEIGHT_DTYPES = ("as_stored", "int8")


class NetworkError(Exception):
    """A network cannot be written: names the option or tensor, what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How numbers are represented in the network."""

    dtype: str = "float32"
    """Activations, and weights that are not quantized: `float32`, `float16` or `bfloat16`. Softmax, norms and rotary
    angles are float32 whatever it is."""
    weight_dtype: str = "as_stored"
    """`as_stored`: dense weights in `dtype`, matrices that the checkpoint holds in 8-bit groups stay so.
    `int8`: every matrix, embedding and head included, in 8-bit groups of 32."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise NetworkError(f"dtype {self.dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise NetworkError(
                f"weight_dtype {self.weight_dtype!r} is unknown; expected one of {', '.join(WEIGHT_DTYPES)}"
            )

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(DTYPES[self.dtype])
