"""A GPU through NVIDIA's own Python bindings (`cuda-bindings`), no torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_build.targets.interface import TargetError
from engine_build.targets.tensorrt.device import count_devices
from executor.engines.cuda.device import (
    Address,
    CudaError,
    Event,
    Graph,
    HostBuffer,
    MemoryInfo,
    NoGpuError,
    OutOfDeviceMemoryError,
    Region,
    Stream,
)

_NON_BLOCKING = 1
"""Streams that do not wait for the default stream (`cudaStreamNonBlocking`)."""
_NO_TIMING = 2
"""Events that only order (`cudaEventDisableTiming`)."""


def open_device(index: int = 0) -> BindingsDevice:
    """The GPU with this number.

    Raises:
        NoGpuError: the package, a driver or the GPU is missing; nothing of CUDA was created.
    """
    try:
        count = count_devices()
    except TargetError as error:
        raise NoGpuError(str(error)) from error
    from cuda.bindings import driver, runtime

    if not 0 <= index < count:
        raise NoGpuError(f"there is no GPU {index}: the driver finds {count}")
    return BindingsDevice(driver, runtime, index)


class PinnedBuffer:
    """See `HostBuffer`."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self._array = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,))

    @property
    def array(self) -> NDArray[np.uint8]:
        return self._array


class MappedRegion:
    """See `Region`."""

    def __init__(self, address: Address, capacity: int) -> None:
        self.address = address
        self.capacity = capacity
        self.mapped = 0
        self.parts: list[tuple[int, int, Any]] = []
        """Offset, size and allocation handle of each part that has memory."""


class BindingsDevice:
    """Implements `Device`."""

    def __init__(self, driver: Any, runtime: Any, index: int) -> None:
        """Make the GPU this thread's current one; its primary context is shared with TensorRT."""
        self._driver, self._runtime = driver, runtime
        self._index = index
        self.make_current()
        properties = self._call(runtime.cudaGetDeviceProperties(index), "cudaGetDeviceProperties")
        self.compute_capability = f"{properties.major}.{properties.minor}"
        self._location = driver.CUmemLocation()
        self._location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = index
        self._allocation = driver.CUmemAllocationProp()
        self._allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._allocation.location = self._location
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._page: int = self._call(
            driver.cuMemGetAllocationGranularity(self._allocation, recommended), "cuMemGetAllocationGranularity"
        )

    def make_current(self) -> None:
        self._call(self._runtime.cudaSetDevice(self._index), "cudaSetDevice")

    def memory(self) -> MemoryInfo:
        free, total = self._call(self._runtime.cudaMemGetInfo(), "cudaMemGetInfo")
        return MemoryInfo(free, total)

    def allocate(self, size: int) -> Address:
        return Address(self._call(self._runtime.cudaMalloc(size), f"cudaMalloc({size})"))

    def free(self, address: Address) -> None:
        self._call(self._runtime.cudaFree(address), "cudaFree")

    def allocate_host(self, size: int) -> PinnedBuffer:
        return PinnedBuffer(self._call(self._runtime.cudaMallocHost(size), f"cudaMallocHost({size})"), size)

    def free_host(self, buffer: HostBuffer) -> None:
        assert isinstance(buffer, PinnedBuffer)
        self._call(self._runtime.cudaFreeHost(buffer.address), "cudaFreeHost")

    def reserve(self, capacity: int) -> MappedRegion:
        size = self._pages(capacity)
        address = self._call(self._driver.cuMemAddressReserve(size, 0, 0, 0), f"cuMemAddressReserve({size})")
        return MappedRegion(Address(int(address)), size)

    def grow(self, region: Region, size: int) -> None:
        assert isinstance(region, MappedRegion)
        missing = self._pages(size) - region.mapped
        if missing <= 0:
            return
        if region.mapped + missing > region.capacity:
            raise ValueError(f"a region of {region.capacity} bytes cannot grow to {region.mapped + missing}")
        driver, begin = self._driver, int(region.address) + region.mapped
        handle = self._call(driver.cuMemCreate(missing, self._allocation, 0), f"cuMemCreate({missing})")
        try:
            self._call(driver.cuMemMap(begin, missing, 0, handle, 0), "cuMemMap")
        except CudaError:
            self._call(driver.cuMemRelease(handle), "cuMemRelease")
            raise
        region.parts.append((region.mapped, missing, handle))
        access = driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(driver.cuMemSetAccess(begin, missing, [access], 1), "cuMemSetAccess")
        self._call(self._runtime.cudaMemset(begin, 0, missing), "cudaMemset")
        self._call(self._runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
        region.mapped += missing

    def release(self, region: Region) -> None:
        assert isinstance(region, MappedRegion)
        driver = self._driver
        for offset, size, handle in region.parts:
            self._call(driver.cuMemUnmap(int(region.address) + offset, size), "cuMemUnmap")
            self._call(driver.cuMemRelease(handle), "cuMemRelease")
        region.parts.clear()
        region.mapped = 0
        self._call(driver.cuMemAddressFree(int(region.address), region.capacity), "cuMemAddressFree")

    def create_stream(self) -> Stream:
        return Stream(int(self._call(self._runtime.cudaStreamCreateWithFlags(_NON_BLOCKING), "cudaStreamCreate")))

    def destroy_stream(self, stream: Stream) -> None:
        self._call(self._runtime.cudaStreamDestroy(stream), "cudaStreamDestroy")

    def create_event(self) -> Event:
        return Event(int(self._call(self._runtime.cudaEventCreateWithFlags(_NO_TIMING), "cudaEventCreate")))

    def destroy_event(self, event: Event) -> None:
        self._call(self._runtime.cudaEventDestroy(event), "cudaEventDestroy")

    def record(self, event: Event, stream: Stream) -> None:
        self._call(self._runtime.cudaEventRecord(event, stream), "cudaEventRecord")

    def wait(self, stream: Stream, event: Event) -> None:
        self._call(self._runtime.cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent")

    def synchronize(self, event: Event) -> None:
        self._call(self._runtime.cudaEventSynchronize(event), "cudaEventSynchronize")

    def synchronize_stream(self, stream: Stream) -> None:
        self._call(self._runtime.cudaStreamSynchronize(stream), "cudaStreamSynchronize")

    def copy_to_device(self, target: Address, source: HostBuffer, size: int, stream: Stream) -> None:
        assert isinstance(source, PinnedBuffer)
        self._copy(target, source.address, size, stream)

    def copy_to_host(self, target: HostBuffer, offset: int, source: Address, size: int, stream: Stream) -> None:
        assert isinstance(target, PinnedBuffer)
        self._copy(target.address + offset, source, size, stream)

    def copy(self, target: Address, source: Address, size: int, stream: Stream) -> None:
        self._copy(target, source, size, stream)

    def begin_capture(self, stream: Stream) -> None:
        # Only this thread's calls are held to what may be captured: others may allocate meanwhile.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call(self._runtime.cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture")

    def end_capture(self, stream: Stream) -> Graph:
        recorded = self._call(self._runtime.cudaStreamEndCapture(stream), "cudaStreamEndCapture")
        try:
            graph = self._call(self._runtime.cudaGraphInstantiate(recorded, 0), "cudaGraphInstantiate")
        finally:
            self._call(self._runtime.cudaGraphDestroy(recorded), "cudaGraphDestroy")
        return Graph(int(graph))

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._call(self._runtime.cudaGraphLaunch(graph, stream), "cudaGraphLaunch")

    def destroy_graph(self, graph: Graph) -> None:
        self._call(self._runtime.cudaGraphExecDestroy(graph), "cudaGraphExecDestroy")

    def _copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call(self._runtime.cudaMemcpyAsync(target, source, size, kind, stream), f"cudaMemcpyAsync({size})")

    def _pages(self, size: int) -> int:
        return -(-size // self._page) * self._page

    def _call(self, result: tuple[Any, ...], what: str) -> Any:
        """The values of a call of the bindings, which give an error code first."""
        status, *values = result
        if int(status) != 0:
            if status.name in ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"):
                raise OutOfDeviceMemoryError(f"{what} failed: {self.memory().free} bytes are free on GPU {self._index}")
            raise CudaError(f"{what} failed on GPU {self._index}: {status.name}")
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)
