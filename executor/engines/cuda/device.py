"""What an engine asks of a GPU. The implementation is `bindings.py`; tests have one that checks every use.

Addresses are plain integers, sizes bytes. Work is queued on streams and done in their order; nothing below waits unless
it says so. Memory that queued work uses must not be freed, unmapped or touched by the host before an event says that
the work is done.
"""

from __future__ import annotations

from typing import NamedTuple, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

Address = NewType("Address", int)
Stream = NewType("Stream", int)
"""A `cudaStream_t`, as TensorRT takes it."""
Event = NewType("Event", int)
Graph = NewType("Graph", int)
"""A captured and instantiated graph."""


class CudaError(RuntimeError):
    """A call of CUDA failed: names the call and CUDA's reason. The device cannot be relied on afterwards."""


class NoGpuError(RuntimeError):
    """There is no GPU that can be used here: says what is missing."""


class OutOfDeviceMemoryError(CudaError):
    """The device has not so much memory left; nothing was allocated."""


class MemoryInfo(NamedTuple):
    free: int
    total: int


class HostBuffer(Protocol):
    """Pinned main memory, which the device copies from and to while the host goes on."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory, `[size]`. Ask for it at each use: between uses it belongs to the device."""
        ...


class Region(Protocol):
    """A range of addresses with memory behind its first part, which can grow in place."""

    address: Address
    capacity: int
    mapped: int
    """Bytes from `address` on that have memory."""


class Device(Protocol):
    """One GPU. Calls come from one thread at a time, which has called `make_current`."""

    compute_capability: str
    """`major.minor`."""

    def make_current(self) -> None:
        """Let what the calling thread does next, in TensorRT too, be done on this GPU. Cheap where it is so already."""
        ...

    def memory(self) -> MemoryInfo: ...

    def allocate(self, size: int) -> Address:
        """Raises `OutOfDeviceMemoryError`."""
        ...

    def free(self, address: Address) -> None: ...

    def allocate_host(self, size: int) -> HostBuffer: ...

    def free_host(self, buffer: HostBuffer) -> None: ...

    def reserve(self, capacity: int) -> Region:
        """Addresses only, rounded up to whole pages; no memory yet."""
        ...

    def grow(self, region: Region, size: int) -> None:
        """Put memory, all zeros, behind the first `size` bytes, whole pages; what is there already stays.

        Waits for the zeros to be written.

        Raises:
            OutOfDeviceMemoryError: the region is as it was.
        """
        ...

    def release(self, region: Region) -> None: ...

    def create_stream(self) -> Stream: ...

    def destroy_stream(self, stream: Stream) -> None: ...

    def create_event(self) -> Event: ...

    def destroy_event(self, event: Event) -> None: ...

    def record(self, event: Event, stream: Stream) -> None:
        """`event` happens when everything queued on `stream` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on `stream` from now on starts after `event`."""
        ...

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""
        ...

    def synchronize_stream(self, stream: Stream) -> None:
        """Let the host wait for everything queued on `stream`."""
        ...

    def copy_to_device(self, target: Address, source: HostBuffer, size: int, stream: Stream) -> None: ...

    def copy_to_host(self, target: HostBuffer, offset: int, source: Address, size: int, stream: Stream) -> None: ...

    def copy(self, target: Address, source: Address, size: int, stream: Stream) -> None: ...

    def begin_capture(self, stream: Stream) -> None:
        """What is queued on `stream` from now on is recorded and not done."""
        ...

    def end_capture(self, stream: Stream) -> Graph: ...

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Queue all that was recorded, at the price of one call."""
        ...

    def destroy_graph(self, graph: Graph) -> None: ...
