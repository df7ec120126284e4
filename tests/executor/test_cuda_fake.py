"""The device that the engine's tests stand on finds what it is there to find."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from executor.engines.cuda.device import Address
from tests.executor.fake_cuda import PAGE, FakeDevice, MisuseError


def test_reading_on_another_stream_without_waiting_is_a_race() -> None:
    device = FakeDevice()
    first, second = device.create_stream(), device.create_stream()
    target, buffer = device.allocate(64), device.allocate_host(64)
    device.copy_to_device(target, buffer, 64, first)
    with pytest.raises(MisuseError, match="without waiting for stream"):
        device.copy_to_host(buffer, 0, target, 64, second)


def test_an_event_orders_two_streams_and_work_is_done_when_the_host_waits() -> None:
    device = FakeDevice()
    first, second, event = device.create_stream(), device.create_stream(), device.create_event()
    target, source, result = device.allocate(64), device.allocate_host(64), device.allocate_host(64)
    source.array[:] = 7
    device.copy_to_device(target, source, 64, first)
    device.record(event, first)
    device.wait(second, event)
    device.copy_to_host(result, 0, target, 64, second)
    with pytest.raises(MisuseError, match="the host touches a pinned buffer that stream"):
        result.array  # noqa: B018
    device.synchronize_stream(second)
    assert set(result.array.tolist()) == {7}


def test_an_event_recorded_too_early_does_not_cover_what_comes_after_it() -> None:
    device = FakeDevice()
    stream, event, buffer = device.create_stream(), device.create_event(), device.allocate_host(64)
    target = device.allocate(64)
    device.record(event, stream)
    device.copy_to_device(target, buffer, 64, stream)
    device.synchronize(event)
    with pytest.raises(MisuseError, match="the host touches"):
        buffer.array  # noqa: B018


def test_memory_is_not_freed_under_work_nor_used_after_it_nor_freed_twice() -> None:
    device = FakeDevice()
    stream, target, buffer = device.create_stream(), device.allocate(64), device.allocate_host(64)
    device.copy_to_device(target, buffer, 64, stream)
    with pytest.raises(MisuseError, match="is freed while stream"):
        device.free(target)
    device.synchronize_stream(stream)
    device.free(target)
    with pytest.raises(MisuseError, match="are in no live buffer"):
        device.copy_to_device(target, buffer, 64, stream)
    with pytest.raises(MisuseError, match="was freed before"):
        device.free(target)


def test_a_region_has_no_memory_beyond_what_it_was_grown_to() -> None:
    device = FakeDevice()
    stream, buffer, region = device.create_stream(), device.allocate_host(64), device.reserve(4 * PAGE)
    device.grow(region, 1)
    device.copy_to_device(Address(region.address + PAGE - 64), buffer, 64, stream)
    with pytest.raises(MisuseError, match="are in no live buffer"):
        device.copy_to_device(Address(region.address + PAGE - 63), buffer, 64, stream)


def test_what_is_captured_is_done_by_each_launch_and_not_before() -> None:
    device = FakeDevice()
    stream, target, buffer = device.create_stream(), device.allocate(64), device.allocate_host(64)
    device.begin_capture(stream)
    device.copy_to_device(target, buffer, 64, stream)
    graph = device.end_capture(stream)
    buffer.array[:] = 3
    device.synchronize_stream(stream)
    assert not device.view(target, 64).any()
    device.launch(graph, stream)
    device.synchronize_stream(stream)
    np.testing.assert_array_equal(device.view(target, 64), buffer.array)


def test_whatever_is_left_is_a_leak() -> None:
    device = FakeDevice()
    device.check_nothing_is_left()
    device.create_event()
    with pytest.raises(MisuseError, match="left over"):
        device.check_nothing_is_left()


def test_a_thread_makes_the_device_its_current_one_before_it_queues_work() -> None:
    device = FakeDevice()
    stream, target, source = device.create_stream(), device.allocate(8), device.allocate_host(8)
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(MisuseError, match="has not made the device its current one"):
            thread.submit(device.copy_to_device, target, source, 8, stream).result()
        thread.submit(device.make_current).result()
        thread.submit(device.copy_to_device, target, source, 8, stream).result()
