"""What a safetensors file holds, told from its header."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine_build.checkpoint.interface import CheckpointError

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of weights that are read, as safetensors names them -> as numpy and `ml_dtypes` do."""
FP8 = "F8_E4M3"
"""Read where a checkpoint has factors for it."""


class StoredTensor(NamedTuple):
    """One tensor in a file."""

    path: Path
    name: str
    dtype: str
    """As safetensors names it: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]

    def read(self) -> NDArray[np.generic]:
        """Raises `CheckpointError` when the file cannot be read."""
        try:
            if self.dtype == FP8:
                return self._read_fp8()
            with safe_open(self.path, framework="numpy") as file:
                values: NDArray[np.generic] = file.get_tensor(self.name)
                return values
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read weight {self.name} from {self.path}: {error}") from error

    def _read_fp8(self) -> NDArray[np.generic]:
        """Safetensors asks numpy for this type, which has none. Its header was checked by `read_headers`."""
        with self.path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(header_size))[self.name]["data_offsets"]
            file.seek(8 + header_size + begin)
            return np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn).reshape(self.shape)


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file by name. Raises `CheckpointError` when it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a mapping
            return {
                name: StoredTensor(path, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error


def check_dtypes(tensors: Iterable[StoredTensor]) -> None:
    """Raises `CheckpointError` for a weight of a type that is not read."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{tensor.path}: weight {tensor.name} is of type {tensor.dtype}; supported are {', '.join(DTYPES)}"
            )


def dominant_dtype(tensors: Iterable[StoredTensor]) -> str:
    """What most elements are stored in."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += prod(tensor.shape)
    dtype = elements.most_common(1)[0][0] if elements else "F32"
    return DTYPES.get(dtype, dtype)
