"""The KV pool of an engine on a GPU: a region for each layer's keys and values, which grow together.

```
for each layer:  key_cache_0    | block 0 | block 1 | ... | scratch |~~~ addresses without memory ~~~|
                 value_cache_0  | block 0 | ...
```
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from executor.engines.cuda.device import Address, Device, OutOfDeviceMemoryError, Region, Stream
from executor.engines.interface import InvalidStepError


class KvPool:
    """Owns the regions of one engine and moves whole blocks in, out and about, in the order of a stream."""

    def __init__(self, device: Device, stream: Stream, block_bytes: Mapping[str, int], capacity: int) -> None:
        """Reserve addresses; `grow` brings memory.

        Args:
            device: where.
            stream: what steps run on, so that they and block moves keep their order.
            block_bytes: cache name -> bytes of a block, layer by layer, keys before values.
            capacity: blocks there can ever be.
        """
        self._device, self._stream = device, stream
        self._block_bytes = dict(block_bytes)
        self._regions: dict[str, Region] = {
            name: device.reserve(size * capacity) for name, size in self._block_bytes.items()
        }
        self.bytes_per_block = sum(self._block_bytes.values())
        self._staging = device.allocate_host(self.bytes_per_block)
        self.capacity = capacity
        self.num_blocks = 0

    @property
    def addresses(self) -> dict[str, Address]:
        return {name: region.address for name, region in self._regions.items()}

    def grow(self, num_blocks: int) -> None:
        """Have memory for so many blocks; what is in the pool stays where it is.

        Raises:
            ValueError: more than `capacity`.
            OutOfDeviceMemoryError: the pool holds as many blocks as before.
        """
        if num_blocks > self.capacity:
            raise ValueError(f"a pool of at most {self.capacity} blocks cannot grow to {num_blocks}")
        try:
            for name, region in self._regions.items():
                self._device.grow(region, num_blocks * self._block_bytes[name])
        except OutOfDeviceMemoryError as error:
            raise OutOfDeviceMemoryError(
                f"{num_blocks} KV blocks of {self.bytes_per_block} bytes do not fit: {error}"
            ) from error
        self.num_blocks = max(self.num_blocks, num_blocks)

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy blocks; every source is read before a target is written."""
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        if set(sources.tolist()) & set(targets.tolist()):
            self._copy_through_scratch(pairs)
            return
        for name, region in self._regions.items():
            size = self._block_bytes[name]
            for source, target in pairs:
                self._device.copy(
                    Address(region.address + target * size), Address(region.address + source * size), size, self._stream
                )

    def read(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """A block's bytes, once everything queued before is done."""
        begin = 0
        for name, region in self._regions.items():
            size = self._block_bytes[name]
            self._device.copy_to_host(
                self._staging, begin, Address(region.address + block_id * size), size, self._stream
            )
            begin += size
        self._device.synchronize_stream(self._stream)
        if out is None:
            return self._staging.array.copy()
        np.copyto(out, self._staging.array)
        return out

    def write(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """Put a block's bytes in. Waits until they are there, since the staging buffer is needed again."""
        if data.dtype != np.uint8 or data.shape != (self.bytes_per_block,):
            raise InvalidStepError(
                f"block data is {data.dtype}{list(data.shape)}; it must be uint8[{self.bytes_per_block}]"
            )
        scratch = self._device.allocate(self.bytes_per_block)
        self._staging.array[:] = data
        self._device.copy_to_device(scratch, self._staging, self.bytes_per_block, self._stream)
        begin = 0
        for name, region in self._regions.items():
            size = self._block_bytes[name]
            self._device.copy(Address(region.address + block_id * size), Address(scratch + begin), size, self._stream)
            begin += size
        self._device.synchronize_stream(self._stream)
        self._device.free(scratch)

    def close(self) -> None:
        """Give the memory back; nothing may be queued any more."""
        self._device.free_host(self._staging)
        for region in self._regions.values():
            self._device.release(region)
        self._regions.clear()

    def _copy_through_scratch(self, pairs: list[tuple[int, int]]) -> None:
        largest = max(self._block_bytes.values())
        scratch = self._device.allocate(largest * len(pairs))
        for name, region in self._regions.items():
            size = self._block_bytes[name]
            for index, (source, _) in enumerate(pairs):
                self._device.copy(
                    Address(scratch + index * size), Address(region.address + source * size), size, self._stream
                )
            for index, (_, target) in enumerate(pairs):
                self._device.copy(
                    Address(region.address + target * size), Address(scratch + index * size), size, self._stream
                )
        self._device.synchronize_stream(self._stream)
        self._device.free(scratch)
