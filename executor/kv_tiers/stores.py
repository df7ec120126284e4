"""Where blocks lie: the engine's pool, host memory. One interface for them all, so that one mover serves every tier."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from executor.engines.interface import Engine


class BlockStore(Protocol):
    """Blocks of `bytes_per_block` bytes in numbered slots.

    Calls for different slots may overlap, those for one slot never do.
    """

    def view(self, slot: int) -> NDArray[np.uint8] | None:
        """`[bytes_per_block]` the slot's bytes where they lie, to be read or written; `None`: they cannot be seen."""
        ...

    def read(self, slot: int, block_hash: bytes, into: NDArray[np.uint8]) -> None:
        """Copy the block out.

        Raises:
            BlockLostError: the slot does not hold what was written under `block_hash`; `into` holds anything.
            OSError: it cannot be read.
        """
        ...

    def write(self, slot: int, block_hash: bytes, data: NDArray[np.uint8]) -> None:
        """Copy a block in. Raises `OSError` when it cannot be written; the slot holds nothing then."""
        ...

    def close(self) -> None: ...


class DeviceStore:
    """The engine's pool; slots are block ids. Closing it leaves the engine alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def view(self, slot: int) -> NDArray[np.uint8] | None:  # noqa: ARG002
        """A block lies in as many pieces as there are layers."""
        return None

    def read(self, slot: int, block_hash: bytes, into: NDArray[np.uint8]) -> None:  # noqa: ARG002
        self._engine.read_block(slot, into)

    def write(self, slot: int, block_hash: bytes, data: NDArray[np.uint8]) -> None:  # noqa: ARG002
        self._engine.write_block(slot, data)

    def close(self) -> None:
        """The engine has its own life."""


class HostPool:
    """Main memory, taken from the system page by page as slots are first written."""

    def __init__(self, num_slots: int, bytes_per_block: int) -> None:
        self._memory = np.zeros((num_slots, bytes_per_block), np.uint8)

    def view(self, slot: int) -> NDArray[np.uint8] | None:
        view: NDArray[np.uint8] = self._memory[slot]
        return view

    def read(self, slot: int, block_hash: bytes, into: NDArray[np.uint8]) -> None:  # noqa: ARG002
        np.copyto(into, self._memory[slot])

    def write(self, slot: int, block_hash: bytes, data: NDArray[np.uint8]) -> None:  # noqa: ARG002
        np.copyto(self._memory[slot], data)

    def close(self) -> None:
        """The memory goes with the pool."""
