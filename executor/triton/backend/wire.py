"""Frames between Triton's interpreters and the Executor's process, over a local stream socket.

```
| header bytes, u32 | body bytes, u32 | header: JSON | body: arrays, one after the other |
```
Numbers and texts are in the header. An array is there as `[dtype, shape, offset]` and its bytes, little endian, are in
the body. Needs the standard library and any numpy: the two ends run different ones.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

VERSION = 1
"""Of the frames' meaning; both ends must agree."""

_LENGTHS = struct.Struct("<II")
_RECEIVE_BYTES = 1 << 18
_MAX_FRAME_BYTES = 1 << 31


class WireError(Exception):
    """The other end closed the connection, or what it sent is no frame."""


class FrameWriter:
    """Gathers the arrays of one frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def put(self, array: Any) -> list[Any]:
        """Append an array to the body; returns what stands for it in the header."""
        data = np.ascontiguousarray(array)
        reference = [data.dtype.str, list(data.shape), self._size]
        self._parts.append(data.tobytes())
        self._size += data.nbytes
        return reference

    def frame(self, header: dict[str, Any]) -> bytes:
        """The frame with this header and what was put."""
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join((_LENGTHS.pack(len(text), self._size), text, *self._parts))


def frame(header: dict[str, Any]) -> bytes:
    """A frame without arrays."""
    return FrameWriter().frame(header)


def array(reference: Sequence[Any], body: memoryview) -> Any:
    """The array that a reference stands for; it shares the body's memory."""
    dtype, shape, offset = reference
    count = 1
    for size in shape:
        count *= size
    return np.frombuffer(body, dtype, count, offset).reshape(shape)


def receive(connection: socket.socket) -> Iterator[tuple[dict[str, Any], memoryview]]:
    """Frames as they come, until the other end closes between two of them.

    Raises:
        WireError: it closed within a frame, or sent something else.
    """
    buffer = bytearray()
    start = 0
    while True:
        while len(buffer) - start >= _LENGTHS.size:
            header_size, body_size = _LENGTHS.unpack_from(buffer, start)
            size = _LENGTHS.size + header_size + body_size
            if size > _MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes; at most {_MAX_FRAME_BYTES} are right")
            if len(buffer) - start < size:
                break
            begin = start + _LENGTHS.size
            middle = begin + header_size
            start += size
            yield json.loads(buffer[begin:middle]), memoryview(bytes(buffer[middle:start]))
        if start:
            del buffer[:start]
            start = 0
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            if buffer:
                raise WireError("the connection ended within a frame")
            return
        buffer += data
