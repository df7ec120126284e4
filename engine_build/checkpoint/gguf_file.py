"""Reading a GGUF file: its metadata and where its tensors lie. No meaning is given to either here.

```
"GGUF" | version u32 | tensor count u64 | metadata count u64
metadata       key, value type, value                                      x metadata count
tensor table   name, dimensions (fastest first), type, offset              x tensor count
padding to general.alignment, then the tensors' bytes
```

Every length is checked against the bytes that are left before anything is read or allocated by it, so a truncated or
damaged file ends in an error, never in a wrong value. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from engine_build.checkpoint.interface import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MetadataValue = bool | int | float | str | list[str] | NDArray[np.generic]

_SCALARS: dict[GGUFValueType, np.dtype[np.generic]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}


class GgufTensorInfo(NamedTuple):
    """One row of the tensor table."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Slowest dimension first, as numpy counts them (the file counts the other way)."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GgufFile:
    """An open GGUF file. Tensor bytes are mapped, not read, until they are used."""

    def __init__(self, path: Path) -> None:
        """Read metadata and tensor table.

        Raises:
            CheckpointError: the file is no GGUF file, of another version or byte order, truncated or damaged.
        """
        self.path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        cursor = _Cursor(self._bytes, path)
        if cursor.take(4, "the magic number") != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}")
        version = cursor.number("<I", "the format version")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path} is of GGUF version {version} or written for the other byte order; "
                f"little-endian versions {VERSIONS[0]} and {VERSIONS[1]} can be read"
            )
        num_tensors = cursor.number("<Q", "the tensor count")
        num_metadata = cursor.number("<Q", "the metadata count")
        self._metadata: dict[str, MetadataValue] = {}
        for _ in range(num_metadata):
            key = cursor.string("a metadata key")
            if key in self._metadata:
                raise CheckpointError(f"{path} has metadata {key} twice")
            self._metadata[key] = cursor.value(f"metadata {key}")
        self.tensors = self._tensor_table(cursor, num_tensors)

    def _tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GgufTensorInfo]:
        rows = [_tensor_row(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment}, it must be positive")
        start = -(-cursor.position // alignment) * alignment
        table: dict[str, GgufTensorInfo] = {}
        for name, type_number, shape, offset in rows:
            info = self._tensor_info(name, type_number, shape, start + offset)
            if name in table:
                raise CheckpointError(f"{self.path} names tensor {name} twice")
            table[name] = info
        return table

    def _tensor_info(self, name: str, type_number: int, shape: tuple[int, ...], offset: int) -> GgufTensorInfo:
        try:
            type_ = GGMLQuantizationType(type_number)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name} is of unknown type number {type_number}") from None
        elements_per_group, bytes_per_group = GGML_QUANT_SIZES[type_]
        if not shape or 0 in shape or shape[-1] % elements_per_group:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(shape)}; a {type_.name} tensor has rows of a positive "
                f"multiple of {elements_per_group} elements"
            )
        num_bytes = math.prod(shape) // elements_per_group * bytes_per_group
        if offset + num_bytes > self._bytes.size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes}, "
                f"the file at byte {self._bytes.size}"
            )
        return GgufTensorInfo(type_, shape, offset, num_bytes)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, `[rows, bytes per row]`; a vector is one row."""
        info = self.tensors[name]
        stored = self._bytes[info.offset : info.offset + info.num_bytes]
        return stored.reshape(math.prod(info.shape[:-1]), -1)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under `key`; without a `default`, its absence is an error."""
        value = self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._unexpected(key, value, "an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self._metadata else None

    def number(self, key: str, default: float | None = None) -> float:
        """The number under `key`; without a `default`, its absence is an error."""
        value = self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unexpected(key, value, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._unexpected(key, value, "a boolean")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """The string under `key`; without a `default`, its absence is an error."""
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self._unexpected(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """The array of strings under `key`."""
        value = self._metadata.get(key)
        if not isinstance(value, list):
            raise self._unexpected(key, value, "an array of strings")
        return value

    def numbers(self, key: str) -> NDArray[np.generic]:
        """The array of numbers under `key`."""
        value = self._metadata.get(key)
        if not isinstance(value, np.ndarray):
            raise self._unexpected(key, value, "an array of numbers")
        return value

    def _unexpected(self, key: str, value: MetadataValue | None, wanted: str) -> CheckpointError:
        if value is None:
            return CheckpointError(f"{self.path} has no metadata {key}, which must be {wanted}")
        shown = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
        return CheckpointError(f"{self.path}: metadata {key} is {shown}, it must be {wanted}")


def _tensor_row(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string("a tensor name")
    num_dimensions = cursor.number("<I", f"the dimensions of tensor {name}")
    dimensions = cursor.array(np.dtype("<u8"), num_dimensions, f"the dimensions of tensor {name}")
    type_number = cursor.number("<I", f"the type of tensor {name}")
    offset = cursor.number("<Q", f"the offset of tensor {name}")
    return name, type_number, tuple(int(size) for size in reversed(dimensions)), offset


class _Cursor:
    """Walks over the file's bytes; `what` names the thing being read, for the error."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self._data = data.data  # slices of it cost a fraction of an array's
        self._path = path
        self.position = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated or damaged: {what} ends at byte {end}, the file at byte {len(self._data)}"
            )
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken

    def number(self, format_: str, what: str) -> int:
        (value,) = struct.unpack(format_, self.take(struct.calcsize(format_), what))
        return int(value)

    def string(self, what: str) -> str:
        encoded = self.take(self.number("<Q", what), what)
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not valid UTF-8: {error}") from error

    def array(self, dtype: np.dtype[np.generic], length: int, what: str) -> NDArray[np.generic]:
        return np.frombuffer(self.take(length * dtype.itemsize, what), dtype)

    def value(self, what: str) -> MetadataValue:
        type_ = self._value_type(what)
        if type_ is not GGUFValueType.ARRAY:
            return self._scalar(type_, what)
        item_type = self._value_type(what)
        length = self.number("<Q", what)
        if item_type in _SCALARS:
            return self.array(_SCALARS[item_type], length, what)
        if item_type is GGUFValueType.STRING:
            return [self.string(what) for _ in range(length)]
        raise CheckpointError(f"{self._path}: {what} is an array of arrays, which no known key uses")

    def _scalar(self, type_: GGUFValueType, what: str) -> MetadataValue:
        if type_ is GGUFValueType.STRING:
            return self.string(what)
        (value,) = self.array(_SCALARS[type_], 1, what).tolist()
        assert isinstance(value, bool | int | float)  # `tolist` of one of `_SCALARS`
        return value

    def _value_type(self, what: str) -> GGUFValueType:
        number = self.number("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(f"{self._path}: {what} is of unknown value type {number}") from None
