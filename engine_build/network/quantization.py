"""Number formats of quantized matrices whose factors an engine applies itself (`DequantizeLinear`).

```
int8   one factor for each row (output feature)          weights only
int4   one for each 128 or 64 columns of a row           weights only
fp8    one for each row; rows of activations are quantized as well, each by its own largest element
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine_build.network.options import NetworkError


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """How the numbers of a matrix `[out, in]` are kept: `weight = value * factor`, symmetric around 0."""

    name: str
    dtype: np.dtype[Any]
    bits: int
    """Of one number in storage."""
    largest: float
    """The value that the largest weight under one factor gets."""
    block_sizes: tuple[int, ...]
    """Columns that share a factor, by preference; empty for whole rows."""
    quantizes_activations: bool

    def block_size(self, columns: int, names: str) -> int:
        """Columns that share a factor, of a matrix of so many.

        Raises:
            NetworkError: they do not make whole blocks.
        """
        if not self.block_sizes:
            return columns
        for size in self.block_sizes:
            if columns % size == 0:
                return size
        sizes = " or ".join(map(str, self.block_sizes))
        raise NetworkError(
            f"{names}: {columns} columns do not make groups of {sizes}: weight_dtype {self.name} is not possible, "
            "int8 is"
        )

    def factors(
        self, weights: NDArray[np.float32], block_size: int, dtype: np.dtype[np.generic]
    ) -> NDArray[np.generic]:
        """`[out, in / block_size]` of `dtype`. Weights that are not finite give factors that are not."""
        blocks = weights.reshape(weights.shape[0], -1, block_size)
        with np.errstate(over="ignore", invalid="ignore"):
            factors: NDArray[np.generic] = (np.abs(blocks).max(axis=-1) / self.largest).astype(dtype)
        return factors

    def values(self, weights: NDArray[np.float32], factors: NDArray[np.generic]) -> NDArray[Any]:
        """`[out, in]` of this format: divided by the factors as they are stored, so that their rounding is made up for.

        A block whose factor is too small to be stored is 0.
        """
        blocks = weights.reshape(*factors.shape, -1)
        divisor = factors.astype(np.float32)
        scaled = blocks / np.where(divisor == 0, np.inf, divisor)[:, :, None]
        clipped = np.clip(scaled, -self.largest, self.largest).reshape(weights.shape)
        if self.dtype == ml_dtypes.float8_e4m3fn:
            return clipped.astype(self.dtype)
        return np.rint(clipped).astype(np.int8).astype(self.dtype)


QUANTIZED_FORMATS = {
    format_.name: format_
    for format_ in (
        QuantizedFormat("int8", np.dtype(np.int8), 8, 127.0, (), False),
        QuantizedFormat("int4", np.dtype(ml_dtypes.int4), 4, 7.0, (128, 64), False),
        QuantizedFormat("fp8", np.dtype(ml_dtypes.float8_e4m3fn), 8, 448.0, (), True),
    )
}
"""By the `weight_dtype` that asks for it."""
