"""The KV pool of an OpenVINO engine: numpy memory that the plugin reads and writes in place.

```
for each layer:  key_cache_0    | block 0 | block 1 | ... | block num_blocks-1 | scratch |
                 value_cache_0  | block 0 | ...                                          |
                 block          = [kv_heads, tokens_per_block, row]
                 row            = head_size elements, or for uint8: float32 scale, float32 zero point, head_size bytes
```

A block of the pool is the same block id in every one of these tensors; its bytes lie together in each. Memory is
taken from the system page by page, when a block is first written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import openvino
from numpy.typing import NDArray

from executor.engines.interface import InvalidStepError

_ALIGNMENT = 64
"""Bytes: a cache line, the widest vector load."""


class KvPool:
    """Owns the cache tensors of one engine and moves whole blocks in, out and about."""

    def __init__(self, block_shapes: Mapping[str, tuple[tuple[int, ...], openvino.Type]], num_blocks: int) -> None:
        """Allocate.

        Args:
            block_shapes: cache name -> shape of one block and type of its elements, layer by layer, keys before values.
            num_blocks: blocks of every tensor, scratch included.
        """
        self.tensors: dict[str, openvino.Tensor] = {}
        self.regions: list[NDArray[np.uint8]] = []
        """`[num_blocks, bytes]` of each tensor."""
        for name, (shape, element_type) in block_shapes.items():
            memory = _aligned_zeros(num_blocks, int(np.prod(shape)) * element_type.size)
            self.regions.append(memory)
            self.tensors[name] = openvino.Tensor(memory, openvino.Shape([num_blocks, *shape]), element_type)
        self.bytes_per_block = sum(memory.shape[1] for memory in self.regions)

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy blocks; every source is read before a target is written."""
        for memory in self.regions:
            memory[targets] = memory[sources]

    def read(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return np.concatenate([memory[block_id] for memory in self.regions], out=out)

    def write(self, block_id: int, data: NDArray[np.uint8]) -> None:
        if data.dtype != np.uint8 or data.shape != (self.bytes_per_block,):
            raise InvalidStepError(
                f"block data is {data.dtype}{list(data.shape)}; it must be uint8[{self.bytes_per_block}]"
            )
        begin = 0
        for memory in self.regions:
            end = begin + memory.shape[1]
            memory[block_id] = data[begin:end]
            begin = end


def _aligned_zeros(num_blocks: int, bytes_per_block: int) -> NDArray[np.uint8]:
    num_bytes = num_blocks * bytes_per_block
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].reshape(num_blocks, bytes_per_block)
