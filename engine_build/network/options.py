"""What can be chosen about a network, beyond what the checkpoint says."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
WEIGHT_DTYPES = ("as_stored", "int8")


class NetworkError(Exception):
    """A network cannot be written: names the option or tensor, what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How numbers are represented in the network."""

    dtype: str = "float32"
    """What weights that are not quantized are stored in: `float32`, `float16` or `bfloat16`. It is also what the plan
    asks an engine to compute in."""
    weight_dtype: str = "as_stored"
    """`as_stored`: dense weights in `dtype`; matrices that the checkpoint holds in 8-bit groups stay so, save the head.
    `int8`: every matrix, embedding and head included, in 8-bit groups of 32."""
    activation_dtype: str = "float32"
    """The type of the graph's values between operators. Engines that choose their own precision for a float32 graph
    (OpenVINO) recognise more of it so; strongly typed engines (TensorRT) need it equal to `dtype`."""

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("activation_dtype", self.activation_dtype)):
            if dtype not in DTYPES:
                raise NetworkError(f"{name} {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise NetworkError(
                f"weight_dtype {self.weight_dtype!r} is unknown; expected one of {', '.join(WEIGHT_DTYPES)}"
            )
