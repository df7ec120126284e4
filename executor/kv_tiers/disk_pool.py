"""Blocks in one preallocated file.

```
kv_blocks.bin   | slot 0        | slot 1        | ...      a slot is a block, rounded up to whole pages
in memory       (hash, checksum) (hash, checksum)
```
One file, since its space is reserved before the first request, not found missing in the middle of one; since a slot
is read and written with one system call through a descriptor that stays open; and since it is its own lock: the kernel
lets go of it when the process dies, however it dies. What a block must be is kept in memory, so that nothing in the
file is trusted: a write that got lost is noticed like a flipped bit.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.api.errors import InvalidRequestError
from executor.kv_tiers.errors import BlockLostError

_logger = logging.getLogger(__name__)

FILE_NAME = "kv_blocks.bin"
_PAGE_BYTES = 4096
_FIELD = "kv_cache_config.disk_cache_dir"


class _Written(NamedTuple):
    """What a slot must hold."""

    block_hash: bytes
    checksum: int
    """CRC-32."""


def slot_bytes(bytes_per_block: int) -> int:
    """Bytes that a block takes on disk: whole pages, so that writing one never reads its neighbour."""
    return -(-bytes_per_block // _PAGE_BYTES) * _PAGE_BYTES


class DiskPool:
    """A file of slots, locked and this process's own while it is open."""

    def __init__(self, directory: Path, num_slots: int, bytes_per_block: int) -> None:
        """Create the file and reserve its space; what a process that has died left there is removed.

        Raises:
            InvalidRequestError: the directory is in use by another process, cannot be written, or has no space.
        """
        self.path = directory / FILE_NAME
        self._slot_bytes = slot_bytes(bytes_per_block)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequestError(
                f"disk_cache_dir {directory} cannot be used: {error.strerror}; it must be a directory that can be "
                "written",
                field=_FIELD,
            ) from error
        try:
            self._lock()
            self._reserve(num_slots * self._slot_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._written: list[_Written | None] = [None] * num_slots

    def view(self, slot: int) -> NDArray[np.uint8] | None:  # noqa: ARG002
        """What is in the file is checked before it is used."""
        return None

    def read(self, slot: int, block_hash: bytes, into: NDArray[np.uint8]) -> None:
        """See `BlockStore.read`."""
        written = self._written[slot]
        if written is None or written.block_hash != block_hash:
            raise BlockLostError("other block", f"slot {slot} of {self.path} does not hold the block")
        if _read(self._file, into, slot * self._slot_bytes) < into.nbytes:
            raise BlockLostError("short file", f"slot {slot} of {self.path} is beyond the end of the file")
        if zlib.crc32(into.data) != written.checksum:
            raise BlockLostError("damaged", f"slot {slot} of {self.path} is damaged: its checksum differs")

    def write(self, slot: int, block_hash: bytes, data: NDArray[np.uint8]) -> None:
        """See `BlockStore.write`."""
        self._written[slot] = None
        _write(self._file, data, slot * self._slot_bytes)
        self._written[slot] = _Written(block_hash, zlib.crc32(data.data))

    def close(self) -> None:
        """Remove the file and unlock."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = (
                "is in use by another executor; give each a directory of its own"
                if error.errno == errno.EWOULDBLOCK
                else f"cannot be locked: {error.strerror}; it must be on a file system with locks"
            )
            raise InvalidRequestError(f"disk_cache_dir {self.path.parent} {why}", field=_FIELD) from error
        left = os.fstat(self._file).st_size
        if left:
            _logger.warning("removed %s, %d MiB that a process which has ended left there", self.path, left >> 20)
            os.ftruncate(self._file, 0)

    def _reserve(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise InvalidRequestError(
                f"disk_cache_size takes {num_bytes} bytes, which {self.path.parent} does not have: {error.strerror}",
                field="kv_cache_config.disk_cache_size",
            ) from error


def _read(file: int, into: NDArray[np.uint8], offset: int) -> int:
    """Fill `into`; returns how many bytes there were."""
    done = 0
    while done < into.nbytes and (count := os.preadv(file, [into.data[done:]], offset + done)):
        done += count
    return done


def _write(file: int, data: NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data.data[done:], offset + done)
