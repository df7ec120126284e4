"""The device on NVIDIA's bindings: each call of `Device`, with data that shows what it did."""

from __future__ import annotations

import numpy as np
import pytest

from executor.engines.cuda.bindings import BindingsDevice, open_device
from executor.engines.cuda.device import OutOfDeviceMemoryError
from executor.engines.cuda.kv_pool import KvPool

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> BindingsDevice:
    return open_device()


def test_copies_keep_the_order_of_events_across_streams(device: BindingsDevice) -> None:
    first, second, event = device.create_stream(), device.create_stream(), device.create_event()
    size = 1 << 24
    source, result, memory = device.allocate_host(size), device.allocate_host(size), device.allocate(size)
    source.array[:] = np.arange(size, dtype=np.uint8)
    device.copy_to_device(memory, source, size, first)
    device.record(event, first)
    device.wait(second, event)
    device.copy_to_host(result, 0, memory, size, second)
    device.record(event, second)
    device.synchronize(event)
    np.testing.assert_array_equal(result.array, source.array)
    for stream in (first, second):
        device.destroy_stream(stream)
    device.destroy_event(event)
    device.free(memory)
    device.free_host(source)
    device.free_host(result)


def test_a_captured_copy_is_done_by_each_launch(device: BindingsDevice) -> None:
    stream, memory = device.create_stream(), device.allocate(256)
    source, result = device.allocate_host(256), device.allocate_host(256)
    device.begin_capture(stream)
    device.copy_to_device(memory, source, 256, stream)
    device.copy_to_host(result, 0, memory, 256, stream)
    graph = device.end_capture(stream)
    for value in (3, 4):
        source.array[:] = value
        device.launch(graph, stream)
        device.synchronize_stream(stream)
        assert set(result.array.tolist()) == {value}
    device.destroy_graph(graph)


def test_a_pool_grows_in_place_zeroed_and_keeps_its_blocks(device: BindingsDevice) -> None:
    stream = device.create_stream()
    pool = KvPool(device, stream, {"key_cache_0": 1 << 20, "value_cache_0": 1 << 20}, 64)
    pool.grow(4)
    addresses = pool.addresses
    data = np.random.default_rng(0).integers(0, 256, pool.bytes_per_block, dtype=np.uint8)
    pool.write(3, data)
    pool.grow(64)
    assert pool.addresses == addresses
    np.testing.assert_array_equal(pool.read(3), data)
    assert not pool.read(63).any()
    pool.copy(np.array([3, 63]), np.array([63, 3]))
    np.testing.assert_array_equal(pool.read(63), data)
    assert not pool.read(3).any()
    pool.close()
    device.destroy_stream(stream)


def test_memory_that_is_not_there_is_refused_and_the_device_goes_on(device: BindingsDevice) -> None:
    free = device.memory().free
    with pytest.raises(OutOfDeviceMemoryError, match="bytes are free"):
        device.allocate(2 * device.memory().total)
    assert device.memory().free == pytest.approx(free, rel=0.01)
