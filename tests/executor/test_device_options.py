"""What a configuration asks of a GPU reaches the engine, or is refused by name; how a GPU's pool is sized."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from engine_build.engine_dir import EngineDirectory
from engine_build.manifest import TensorRtConfig
from executor import (
    Executor,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    InvalidRequestError,
    KvCacheConfig,
    ParallelConfig,
    RequestError,
    UnsupportedFeatureError,
)
from executor.cli import app
from executor.engines.device_options import DeviceOptions, check_device_options, device_options
from executor.engines.openvino_padding import padded_sizes
from executor.engines.tensorrt import TensorRtEngine
from executor.pool_size import gpu_memory, main_memory, pool_size
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.fake_cuda import FakeDevice
from tests.executor.fake_plan import FakePlan
from tests.executor.tiny_engine import engine_spec, write_tiny_network

GIB = 1 << 30


def as_target(engine_dir: Path, target: str, *, weight_streaming: bool = False) -> EngineDirectory:
    """The same manifest, as if for another target."""
    directory = EngineDirectory.open(engine_dir)
    settings = TensorRtConfig(("9.0",), "float16", False, weight_streaming, "none")
    build = dataclasses.replace(directory.build_config, tensorrt=settings)
    return dataclasses.replace(
        directory, manifest=dataclasses.replace(directory.manifest, target=target, build_config=build)
    )


def test_fields_become_options() -> None:
    assert device_options(ExecutorConfig()) == DeviceOptions()
    config = ExecutorConfig(
        parallel_config=ParallelConfig(device_ids=[3]),
        gpu_weights_percent=0.25,
        extended_runtime_perf_knob_config=ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True, cuda_graph_cache_size=4),
    )
    config.validate()
    assert device_options(config) == DeviceOptions(3, 0.25, True, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel_config": ParallelConfig(device_ids=[0, 1])}, r"device_ids is \[0, 1\]: one process drives one"),
        ({"parallel_config": ParallelConfig(device_ids=[])}, r"device_ids is \[\]; it must hold one number"),
        ({"parallel_config": ParallelConfig(device_ids=[-1])}, r"device_ids is \[-1\]; it must hold one number"),
        ({"parallel_config": ParallelConfig(num_nodes=2)}, "parallel_config.num_nodes is not supported"),
        ({"gpu_weights_percent": 0.0}, r"gpu_weights_percent is 0.0; it must be in \(0, 1\]"),
        ({"gpu_weights_percent": float("nan")}, "gpu_weights_percent is nan"),
        (
            {"extended_runtime_perf_knob_config": ExtendedRuntimePerfKnobConfig(cuda_graph_cache_size=2)},
            "cuda_graph_cache_size is 2; it goes with cuda_graph_mode, which is None",
        ),
        (
            {"extended_runtime_perf_knob_config": ExtendedRuntimePerfKnobConfig(cuda_graph_cache_size=-1)},
            "cuda_graph_cache_size is -1; it must be 0 or more",
        ),
    ],
)
def test_wrong_values_are_named_whatever_the_engine_is(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ExecutorConfig(**fields).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"parallel_config": ParallelConfig(device_ids=[0])},
            r"device_ids is \[0\], .* reference runs on the CPU here",
        ),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent is 0.5, .* reference does not stream weights"),
        (
            {"extended_runtime_perf_knob_config": ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True)},
            "cuda_graph_mode is True, .* reference records no CUDA graphs here; tensorrt does, and reference on a GPU",
        ),
    ],
)
def test_what_a_target_cannot_do_is_refused_before_it_is_loaded(
    tiny_engine_dir: Path, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.engines.reference.default_device", lambda: "cpu")
    monkeypatch.setattr("executor.assembly.open_engine", lambda *_, **__: pytest.fail("the engine is loaded"))
    with pytest.raises(UnsupportedFeatureError, match=message):
        Executor(tiny_engine_dir, ExecutorConfig(**fields))


def test_options_of_other_targets(tiny_engine_dir: Path) -> None:
    openvino, rtx = (as_target(tiny_engine_dir, target) for target in ("openvino", "tensorrt-rtx"))
    with pytest.raises(UnsupportedFeatureError, match="target openvino runs on the CPU here"):
        check_device_options(DeviceOptions(device_id=0), openvino, on_gpu=False)
    with pytest.raises(UnsupportedFeatureError, match="was built without --weight_streaming"):
        check_device_options(DeviceOptions(weights_fraction=0.5), rtx, on_gpu=True)
    with pytest.raises(UnsupportedFeatureError, match="target tensorrt-rtx records no CUDA graphs here"):
        check_device_options(DeviceOptions(cuda_graphs=True), rtx, on_gpu=True)
    check_device_options(DeviceOptions(0, cuda_graphs=True), EngineDirectory.open(tiny_engine_dir), on_gpu=True)
    streaming = as_target(tiny_engine_dir, "tensorrt", weight_streaming=True)
    check_device_options(DeviceOptions(1, 0.5, True, 4), streaming, on_gpu=True)
    check_device_options(DeviceOptions(cuda_graphs=False), openvino, on_gpu=False)


@pytest.mark.parametrize(
    ("most", "recorded"), [(0, [1, 4, 8, 12, 16]), (1, [16]), (2, [8, 16]), (99, [1, 4, 8, 12, 16])]
)
def test_so_many_sizes_are_recorded_and_the_largest_takes_any_batch(
    most: int, recorded: list[int], tmp_path: Path
) -> None:
    device, spec = FakeDevice(), engine_spec(tiny_config())
    assert list(padded_sizes(spec.max_batch_size, 1)) == [1, 4, 8, 12, 16]
    plan = FakePlan(device, write_tiny_network(TinyCheckpoint(), tmp_path), spec)
    engine = TensorRtEngine(plan, device, spec, 64, kv_cache_dtype="float32", num_graph_sizes=most)
    engine.warm_up()
    assert sorted({engine.padded_rows(rows) for rows in range(1, 17)}) == recorded
    assert len(device._graphs) == 2 * len(recorded)  # for each of the two steps in flight
    engine.close()
    device.check_nothing_is_left()


def test_nothing_is_recorded_without_graphs(tmp_path: Path) -> None:
    device, spec = FakeDevice(), engine_spec(tiny_config())
    plan = FakePlan(device, write_tiny_network(TinyCheckpoint(), tmp_path), spec)
    engine = TensorRtEngine(plan, device, spec, 64, kv_cache_dtype="float32", cuda_graphs=False)
    engine.warm_up()
    assert not device._graphs
    assert engine.padded_rows(3) == 3
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device_id", "0"], "error: parallel_config.device_ids is [0]"),
        (["--gpu_weights_percent", "0.5"], "error: gpu_weights_percent is 0.5"),
        (["--gpu_weights_percent", "1.5"], "error: gpu_weights_percent is 1.5; it must be in (0, 1]"),
        (["--cuda_graph_mode"], "error: extended_runtime_perf_knob_config.cuda_graph_mode is True"),
        (["--no_cuda_graph_mode", "--cuda_graph_cache_size", "2"], "it goes with cuda_graph_mode, which is False"),
    ],
)
def test_flags_of_the_command_line_reach_the_configuration(
    arguments: list[str], message: str, tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.engines.reference.default_device", lambda: "cpu")
    result = CliRunner().invoke(app, ["generate", str(tiny_engine_dir), "--prompt", "x", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# -- the pool's size


def test_a_gpus_pool_takes_nine_tenths_of_what_the_engine_leaves() -> None:
    spec = dataclasses.replace(engine_spec(tiny_config()), kv_bytes_per_block=1 << 20, max_seq_len=1 << 20)
    size = pool_size(KvCacheConfig(), spec, 16, gpu_memory(80 * GIB, 10 * GIB))
    assert size.num_blocks == 63 * 1024
    assert size.reason.endswith("63.0 GiB): 90% of 70.0 GiB (80.0 GiB free on the GPU, 10.0 GiB of it for the engine)")
    size = pool_size(KvCacheConfig(free_gpu_memory_fraction=0.5), spec, 16, gpu_memory(80 * GIB, 10 * GIB))
    assert size.num_blocks == 35 * 1024
    with pytest.raises(InvalidRequestError, match=r"no block: 90% of 0 MiB \(8.0 GiB free on the GPU, 10.0 GiB of it"):
        pool_size(KvCacheConfig(), spec, 16, gpu_memory(8 * GIB, 10 * GIB))


def test_below_a_gpus_pool_the_host_tier_is_bounded_by_main_memory() -> None:
    spec = engine_spec(tiny_config())
    with pytest.raises(InvalidRequestError, match=r"host_cache_size is .* of main memory are free"):
        pool_size(KvCacheConfig(host_cache_size=1 << 60), spec, 16, gpu_memory(1 << 62, 0))
    assert pool_size(KvCacheConfig(host_cache_size=1 << 24), spec, 16, gpu_memory(1 << 24, 0)).host_blocks > 0


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_pool_never_takes_more_than_there_is(free: int, engine: int) -> None:
    spec = engine_spec(tiny_config())
    memory = gpu_memory(free, engine)
    assert 0 <= memory.num_bytes <= free
    try:
        size = pool_size(KvCacheConfig(), spec, 16, memory)
    except InvalidRequestError:
        assert memory.num_bytes * memory.default_fraction < spec.kv_bytes_per_block
    else:
        assert size.num_blocks * spec.kv_bytes_per_block + min(engine, free) <= free


def test_main_memory_is_shared() -> None:
    assert main_memory().default_fraction == 0.3
    assert not main_memory().on_gpu
