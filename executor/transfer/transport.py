"""What moves bytes: one-sided reads from another instance's pool into our own, posted and polled, never waited for.

```
post ─► IN_PROGRESS ─► DONE            every byte is there
             │  └────► FAILED          nothing more will be written
             └ cancel ─► quiet?        no: it may still be written to; ask again
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class TransportError(Exception):
    """A read cannot be posted: the peer is not reachable, or its memory is not what it said."""


class Region(NamedTuple):
    """One contiguous piece of a pool: block b lies at `address + b * bytes_per_block`."""

    address: int
    bytes_per_block: int
    num_blocks: int

    @staticmethod
    def of(memory: NDArray[np.uint8]) -> Region:
        """The region of a C-contiguous array `[num_blocks, bytes]`."""
        if not memory.flags.c_contiguous or memory.ndim != 2:
            raise ValueError(f"a region must be a contiguous [num_blocks, bytes] array, not {memory.shape}")
        return Region(memory.ctypes.data, memory.shape[1], memory.shape[0])


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool as a transport knows it; what a peer needs to read from it."""

    transport: str
    metadata: bytes
    regions: tuple[Region, ...]


class ReadState(Enum):
    IN_PROGRESS = "in progress"
    DONE = "done"
    FAILED = "failed"


class Read(Protocol):
    """One posted read."""

    def poll(self) -> ReadState:
        """Where it is. Does not wait."""
        ...

    def cancel(self) -> bool:
        """Ask for its end; whether it is certain that nothing more will be written. Repeated until it is."""
        ...


class Transport(Protocol):
    """Reads between pools. One thread makes all calls."""

    name: str

    def register(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """Let peers read these, and reads write to them. The arrays must outlive the transport."""
        ...

    def unregister(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """Undo `register`; nothing reads or writes these any more."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to reach all that has been registered."""
        ...

    def progress(self) -> None:
        """Let reads of peers from here go on; called often while there may be some."""
        ...

    def read(self, source: PoolMemory, spans: NDArray[np.uint64]) -> Read:
        """Post a read.

        Args:
            source: the peer's memory.
            spans: `[n, 3]`: the peer's address, our address, number of bytes.

        Raises:
            TransportError: it cannot be posted; nothing was written.
        """
        ...

    def close(self) -> None: ...


def spans_between(
    source: Sequence[Region], source_ids: Sequence[int], target: Sequence[Region], target_ids: Sequence[int]
) -> NDArray[np.uint64]:
    """Spans that bring blocks of one pool into blocks of another, equally laid out one.

    Neighbouring blocks that go to neighbouring blocks share a span: a span is as long as the block tables allow.

    Returns:
        `[n, 3]`: source address, target address, number of bytes.

    Raises:
        TransportError: the pools' regions differ, or a block lies outside.
    """
    there, here = np.array(source, np.uint64).reshape(-1, 3), np.array(target, np.uint64).reshape(-1, 3)
    if there.shape != here.shape or (there[:, 1] != here[:, 1]).any():
        raise TransportError("the peer's pool has other regions than ours, although the layouts are equal")
    check_block_ids(source, source_ids)
    check_block_ids(target, target_ids)
    runs = np.array(_shared_runs(source_ids, target_ids), np.uint64).reshape(-1, 3)
    num_bytes = there[:, 1:2]  # [regions, 1]; runs are columns
    spans = np.empty((len(there), len(runs), 3), np.uint64)
    spans[:, :, 0] = there[:, :1] + runs[:, 0] * num_bytes
    spans[:, :, 1] = here[:, :1] + runs[:, 1] * num_bytes
    spans[:, :, 2] = runs[:, 2] * num_bytes
    return spans.reshape(-1, 3)


def _shared_runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source id, target id, length) of runs that ascend by one in both tables, in any order."""
    runs: list[tuple[int, int, int]] = []
    for source_id, target_id in sorted(zip(source_ids, target_ids, strict=True)):
        if runs and (source_id, target_id) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source_id, target_id, 1))
    return runs


def check_block_ids(regions: Sequence[Region], block_ids: Sequence[int]) -> None:
    """Raises `TransportError` for a block outside the pool: nothing may be read or written there."""
    num_blocks = min((region.num_blocks for region in regions), default=0)
    if len(block_ids) and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        raise TransportError(f"blocks {min(block_ids)} to {max(block_ids)} are outside a pool of {num_blocks} blocks")


def spans_to_staging(source: Sequence[Region], block_ids: Sequence[int], staging: Region) -> NDArray[np.uint64]:
    """Spans that bring blocks of a pool into a staging array `[blocks, bytes of all regions]`, block by block."""
    check_block_ids(source, block_ids)
    pieces = []
    offset = 0
    for region in source:
        for index, block_id in enumerate(block_ids):
            there = region.address + block_id * region.bytes_per_block
            here = staging.address + index * staging.bytes_per_block + offset
            pieces.append((there, here, region.bytes_per_block))
        offset += region.bytes_per_block
    return np.array(pieces, np.uint64).reshape(-1, 3)
