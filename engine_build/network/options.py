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
WEIGHT_DTYPES = ("as_stored", "int8", "int4", "fp8")
QUANTIZED_AS = ("groups", "quantize_linear")


class NetworkError(Exception):
    """A network cannot be written: names the option or tensor, what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How numbers are represented in the network."""

    dtype: str = "float32"
    """What weights that are not quantized are stored in: `float32`, `float16` or `bfloat16`. It is also what the plan
    asks an engine to compute in."""
    weight_dtype: str = "as_stored"
    """What matrices are kept as; see `quantized_as`."""
    activation_dtype: str = "float32"
    """The type of the graph's values between operators. Engines that choose their own precision for a float32 graph
    (OpenVINO) recognise more of it so; strongly typed engines (TensorRT) need it equal to `dtype`."""
    quantized_as: str = "groups"
    """How a quantized matrix is written.

    `groups`: in 8-bit groups of 32, unpacked by `Cast`, `Mul` and `Reshape`. With `as_stored` only matrices that the
    checkpoint holds so, save the head; with `int8` all, embedding and head included. There is no `int4` or `fp8`.
    `quantize_linear`: by `DequantizeLinear` in a format of `engine_build.network.quantization`, embedding and head
    dense in `dtype`; with `as_stored` all are dense."""

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("activation_dtype", self.activation_dtype)):
            if dtype not in DTYPES:
                raise NetworkError(f"{name} {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise NetworkError(
                f"weight_dtype {self.weight_dtype!r} is unknown; expected one of {', '.join(WEIGHT_DTYPES)}"
            )
        if self.quantized_as not in QUANTIZED_AS:
            raise NetworkError(
                f"quantized_as {self.quantized_as!r} is unknown; expected one of {', '.join(QUANTIZED_AS)}"
            )
        if self.quantized_as == "groups" and self.weight_dtype not in ("as_stored", "int8"):
            raise NetworkError(
                f"weight_dtype {self.weight_dtype!r} cannot be written as groups; as_stored and int8 can"
            )
