"""A GPU made of numpy memory that checks every use: ordering between streams, life of memory, leaks.

Queued work is done as late as it may be: only when the host waits for something that comes after it. So a missing wait
shows as stale data; and it is an error besides, found with vector clocks as soon as the second of two uses is queued.

```
clock of a stream   for each stream, how much of its work comes before what is queued next
event               the clock of a stream when it was recorded
host's clock        what the host has waited for
```
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.engines.cuda.device import (
    Address,
    Event,
    Graph,
    HostBuffer,
    MemoryInfo,
    OutOfDeviceMemoryError,
    Region,
    Stream,
)

_FIRST_ADDRESS = 1 << 44
_GAP = 1 << 32
"""Between allocations, so that running over the end of one meets nothing."""
PAGE = 4096
Clock = dict[Stream, int]


class MisuseError(AssertionError):
    """What would be a race, a use of freed memory or a leak on a real device."""


class Span(NamedTuple):
    """Memory that a piece of work uses."""

    address: int
    size: int


class _Access(NamedTuple):
    begin: int
    end: int
    writes: bool
    stream: Stream
    number: int


class _Work(NamedTuple):
    stream: Stream
    number: int
    run: Callable[[], None]


class _Recorded(NamedTuple):
    reads: Sequence[Span]
    writes: Sequence[Span]
    run: Callable[[], None]


@dataclass
class _Memory:
    """Implements `Region` too."""

    address: Address
    data: NDArray[np.uint8]
    kind: str
    mapped: int
    accesses: list[_Access] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return len(self.data)


class _PinnedBuffer:
    def __init__(self, device: FakeDevice, memory: _Memory) -> None:
        self._device, self.memory = device, memory

    @property
    def array(self) -> NDArray[np.uint8]:
        self._device.check_host_may_touch(self.memory)
        return self.memory.data


class FakeDevice:
    """Implements `Device`."""

    compute_capability = "9.0"

    def __init__(self, total_memory: int = 1 << 40) -> None:
        self._total = total_memory
        self._addresses = itertools.count(_FIRST_ADDRESS, _GAP)
        self._handles = itertools.count(1)
        self._memories: dict[int, _Memory] = {}
        self._clocks: dict[Stream, Clock] = {}
        self._events: dict[Event, Clock] = {}
        self._graphs: dict[Graph, list[_Recorded]] = {}
        self._host: Clock = {}
        self._pending: list[_Work] = []
        self._capturing: dict[Stream, list[_Recorded]] = {}
        self._threads = {threading.get_ident()}
        self.calls: list[str] = []
        """Names of what was queued, in order."""

    # -- what tests ask ---------------------------------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Raises `MisuseError` for anything that was created and not given back."""
        left = {
            "memory": [memory.kind for memory in self._memories.values()],
            "streams": list(self._clocks),
            "events": list(self._events),
            "graphs": list(self._graphs),
        }
        if any(left.values()):
            raise MisuseError(f"left over: {left}")

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Device memory, for work that is being done."""
        memory = self._find(Span(address, size))
        begin = address - memory.address
        return memory.data[begin : begin + size]

    def queue(
        self, name: str, stream: Stream, run: Callable[[], None], reads: Sequence[Span], writes: Sequence[Span]
    ) -> None:
        """Queue work that uses these spans; what a kernel launch comes down to."""
        self.calls.append(name)
        self._queue(stream, _Recorded(reads, writes, run))

    def check_host_may_touch(self, memory: _Memory) -> None:
        for access in memory.accesses:
            if self._host.get(access.stream, 0) < access.number:
                raise MisuseError(f"the host touches a {memory.kind} buffer that stream {access.stream} still uses")

    # -- Device -----------------------------------------------------------------------------------------------------

    def make_current(self) -> None:
        self._threads.add(threading.get_ident())

    def memory(self) -> MemoryInfo:
        used = sum(memory.mapped for memory in self._memories.values() if memory.kind != "pinned")
        return MemoryInfo(self._total - used, self._total)

    def allocate(self, size: int) -> Address:
        if size > self.memory().free:
            raise OutOfDeviceMemoryError(f"allocate({size}) failed: {self.memory().free} bytes are free")
        return self._new(size, "device", size).address

    def free(self, address: Address) -> None:
        self._drop(address, "device")

    def allocate_host(self, size: int) -> _PinnedBuffer:
        return _PinnedBuffer(self, self._new(size, "pinned", size))

    def free_host(self, buffer: HostBuffer) -> None:
        assert isinstance(buffer, _PinnedBuffer)
        self._drop(buffer.memory.address, "pinned")

    def reserve(self, capacity: int) -> _Memory:
        return self._new(-(-capacity // PAGE) * PAGE, "region", 0)

    def grow(self, region: Region, size: int) -> None:
        assert isinstance(region, _Memory)
        wanted = -(-size // PAGE) * PAGE
        if wanted - region.mapped > self.memory().free:
            raise OutOfDeviceMemoryError(f"grow({wanted}) failed: {self.memory().free} bytes are free")
        region.mapped = max(region.mapped, wanted)

    def release(self, region: Region) -> None:
        self._drop(region.address, "region")

    def create_stream(self) -> Stream:
        stream = Stream(next(self._handles))
        self._clocks[stream] = {}
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        if any(work.stream == stream for work in self._pending):
            raise MisuseError(f"stream {stream} is destroyed with work in it")
        del self._clocks[stream]

    def create_event(self) -> Event:
        event = Event(next(self._handles))
        self._events[event] = {}
        return event

    def destroy_event(self, event: Event) -> None:
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        self._events[event] = dict(self._clocks[stream])

    def wait(self, stream: Stream, event: Event) -> None:
        _merge(self._clocks[stream], self._events[event])

    def synchronize(self, event: Event) -> None:
        self._wait_for(self._events[event])

    def synchronize_stream(self, stream: Stream) -> None:
        self._wait_for(self._clocks[stream])

    def copy_to_device(self, target: Address, source: HostBuffer, size: int, stream: Stream) -> None:
        assert isinstance(source, _PinnedBuffer)
        self._copy("copy_to_device", target, source.memory.address, size, stream)

    def copy_to_host(self, target: HostBuffer, offset: int, source: Address, size: int, stream: Stream) -> None:
        assert isinstance(target, _PinnedBuffer)
        self._copy("copy_to_host", target.memory.address + offset, source, size, stream)

    def copy(self, target: Address, source: Address, size: int, stream: Stream) -> None:
        self._copy("copy", target, source, size, stream)

    def begin_capture(self, stream: Stream) -> None:
        self._capturing[stream] = []

    def end_capture(self, stream: Stream) -> Graph:
        graph = Graph(next(self._handles))
        self._graphs[graph] = self._capturing.pop(stream)
        return graph

    def launch(self, graph: Graph, stream: Stream) -> None:
        self.calls.append("launch")
        for recorded in self._graphs[graph]:
            self._queue(stream, recorded)

    def destroy_graph(self, graph: Graph) -> None:
        del self._graphs[graph]

    # -- how it works -----------------------------------------------------------------------------------------------

    def _copy(self, name: str, target: int, source: int, size: int, stream: Stream) -> None:
        def run() -> None:
            self.view(target, size)[:] = self.view(source, size)

        self.queue(name, stream, run, [Span(source, size)], [Span(target, size)])

    def _queue(self, stream: Stream, work: _Recorded) -> None:
        if threading.get_ident() not in self._threads:
            raise MisuseError("a thread queues work that has not made the device its current one")
        spans = [(span, False) for span in work.reads] + [(span, True) for span in work.writes]
        if stream in self._capturing:
            for span, _ in spans:
                self._find(span)
            self._capturing[stream].append(work)
            return
        clock = self._clocks[stream]
        number = clock[stream] = clock.get(stream, 0) + 1
        for span, writes in spans:
            memory = self._find(span)
            new = _Access(span.address, span.address + span.size, writes, stream, number)
            for old in memory.accesses:
                overlaps = old.begin < new.end and new.begin < old.end
                if overlaps and (old.writes or writes) and clock.get(old.stream, 0) < old.number:
                    raise MisuseError(
                        f"stream {stream} uses a {memory.kind} buffer without waiting for stream {old.stream}"
                    )
            memory.accesses.append(new)
        self._pending.append(_Work(stream, number, work.run))

    def _wait_for(self, clock: Clock) -> None:
        _merge(self._host, clock)
        is_due = [work.number <= self._host.get(work.stream, 0) for work in self._pending]
        due = [work for work, due in zip(self._pending, is_due, strict=True) if due]
        self._pending = [work for work, due in zip(self._pending, is_due, strict=True) if not due]
        for work in due:
            work.run()
        for memory in self._memories.values():
            memory.accesses = [use for use in memory.accesses if self._host.get(use.stream, 0) < use.number]

    def _new(self, size: int, kind: str, mapped: int) -> _Memory:
        memory = _Memory(Address(next(self._addresses)), np.zeros(size, np.uint8), kind, mapped)
        self._memories[memory.address] = memory
        return memory

    def _drop(self, address: int, kind: str) -> None:
        memory = self._memories.get(address)
        if memory is None or memory.kind != kind:
            raise MisuseError(f"{address:#x} is no {kind} buffer, or was freed before")
        if memory.accesses:
            raise MisuseError(f"a {kind} buffer is freed while stream {memory.accesses[-1].stream} uses it")
        del self._memories[address]

    def _find(self, span: Span) -> _Memory:
        for memory in self._memories.values():
            if memory.address <= span.address and span.address + span.size <= memory.address + memory.mapped:
                return memory
        raise MisuseError(f"{span.size} bytes at {span.address:#x} are in no live buffer")


def _merge(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)
