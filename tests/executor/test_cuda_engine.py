"""The TensorRT engine's own work, on a device that checks every use: no GPU and no TensorRT are needed.

What a plan computes stands in the reference graph here; that real plans compute it is for `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_build.engine_dir import EngineDirectory
from executor import Executor, ExecutorConfig
from executor.api.errors import UnsupportedFeatureError
from executor.engines.cuda.device import OutOfDeviceMemoryError
from executor.engines.interface import Engine, InvalidStepError
from executor.engines.open import engine_spec as spec_of_directory
from executor.engines.reference_kv_cache import KV_CACHE_DTYPES
from executor.engines.tensorrt import TensorRtEngine
from executor.engines.tensorrt_plan import PlanError
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.driving import request, run, tokens_of
from tests.executor.fake_cuda import PAGE, FakeDevice
from tests.executor.fake_plan import FakePlan
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import engine_spec, reference_engine, write_tiny_network

NUM_BLOCKS = 64
FIRST, SECOND = list(range(5, 30)), list(range(60, 100))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_network(TinyCheckpoint(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """What a test leaves behind on it is an error."""
    device = FakeDevice()
    yield device
    device.check_nothing_is_left()


def open_engine(device: FakeDevice, model_path: Path, **options: int) -> TensorRtEngine:
    spec = engine_spec(tiny_config())
    return TensorRtEngine(
        FakePlan(device, model_path, spec), device, spec, NUM_BLOCKS, kv_cache_dtype="float32", **options
    )


@pytest.fixture
def engine(device: FakeDevice, model_path: Path) -> Iterator[TensorRtEngine]:
    engine = open_engine(device, model_path, max_num_blocks=2 * NUM_BLOCKS)
    yield engine
    engine.close()


def generate(engine: Engine) -> list[np.ndarray]:
    """Logits of a prompt step, of three generation steps of two sequences, and of a mixed step."""
    tables = [[3, 1, 4, 15, 9, 2, 6], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
    steps = [pack([Piece(FIRST, 0, 20, tables[0]), Piece(SECOND, 0, 30, tables[1])], 4, [19, 49])]
    steps += [
        pack([Piece(FIRST, 20 + n, 21 + n, tables[0]), Piece(SECOND, 30 + n, 31 + n, tables[1])], 4) for n in range(3)
    ]
    steps += [pack([Piece(FIRST, 23, 24, tables[0]), Piece(SECOND, 33, 38, tables[1])], 4, [0, 5])]
    return [engine.execute(step).copy() for step in steps]


def test_logits_are_those_of_the_reference_with_graphs_and_without(engine: TensorRtEngine, model_path: Path) -> None:
    expected = generate(reference_engine(model_path, tiny_config()))
    for _ in range(2):
        for logits, wanted in zip(generate(engine), expected, strict=True):
            np.testing.assert_array_equal(logits, wanted)
        engine.warm_up()


def test_a_generation_step_is_one_copy_in_one_launch_and_one_copy_out(
    engine: TensorRtEngine, device: FakeDevice
) -> None:
    engine.warm_up()
    device.calls.clear()
    step = pack([Piece(FIRST, 3, 4, [7]), Piece(SECOND, 2, 3, [8]), Piece(SECOND, 0, 1, [9])], 4)
    engine.execute(step)
    assert device.calls == ["copy_to_device", "launch", "copy_to_host"]
    device.calls.clear()
    engine.execute(pack([Piece(FIRST, 3, 5, [7, 10])], 4))
    assert device.calls == ["copy_to_device", "network", "copy_to_host"]
    device.calls.clear()
    engine.execute(pack([Piece(FIRST, 3, 5, [7, 10])], 4, []))
    assert device.calls == ["copy_to_device", "network"]  # nothing is sampled, nothing comes back


def test_a_plan_that_cannot_be_recorded_runs_layer_by_layer(device: FakeDevice, model_path: Path) -> None:
    spec = engine_spec(tiny_config())
    plan = FakePlan(device, model_path, spec, can_be_captured=False)
    engine = TensorRtEngine(plan, device, spec, NUM_BLOCKS, kv_cache_dtype="float32")
    engine.warm_up()
    assert "launch" not in device.calls
    expected = generate(reference_engine(model_path, tiny_config()))
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(expected))
    engine.close()


@settings(max_examples=15, deadline=None)
@given(
    row_counts=st.lists(st.integers(1, 3), min_size=1, max_size=9),
    num_ahead=st.integers(0, 1),
    warm=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_steps_queued_ahead_give_what_they_give_one_by_one(
    row_counts: list[int], num_ahead: int, warm: bool, seed: int, model_path: Path
) -> None:
    """Rows of several sequences, packed at random into steps; the host packs the next step while one runs."""
    generator = np.random.default_rng(seed)
    tables = np.split(generator.permutation(NUM_BLOCKS), 4)
    computed, steps = [0] * 4, []
    for count in row_counts:
        chosen = sorted(generator.choice(4, count, replace=False))
        rows = [1] * count if generator.random() < 0.6 else generator.integers(1, 6, count).tolist()
        pieces = []
        for sequence, num in zip(chosen, rows, strict=True):
            ids = generator.integers(0, 128, computed[sequence] + num).tolist()
            pieces.append(Piece(ids, computed[sequence], computed[sequence] + num, tables[sequence].tolist()))
            computed[sequence] += num
        steps.append(pack(pieces, 4))
    reference = reference_engine(model_path, tiny_config())
    expected = [reference.execute(step).copy() for step in steps]

    device = FakeDevice()
    engine = open_engine(device, model_path)
    if warm:
        engine.warm_up()
    pending = [engine.submit(step) for step in steps[:num_ahead]]
    for index in range(len(steps)):
        if index + num_ahead < len(steps):
            pending.append(engine.submit(steps[index + num_ahead]))
        np.testing.assert_array_equal(pending[index](), expected[index])
    engine.close()
    device.check_nothing_is_left()


def test_blocks_are_read_written_and_copied_in_the_order_of_the_steps(engine: TensorRtEngine, model_path: Path) -> None:
    reference = reference_engine(model_path, tiny_config())
    step = pack([Piece(FIRST, 0, 12, [3, 1, 4])], 4)
    for one in (engine, reference):
        one.execute(step)
    for block in (3, 1, 4):
        np.testing.assert_array_equal(engine.read_block(block), reference.read_block(block))
    out = np.empty(engine.spec.kv_bytes_per_block, np.uint8)
    engine.write_block(9, engine.read_block(3, out))
    engine.copy_blocks(np.array([1, 4]), np.array([10, 11]))
    np.testing.assert_array_equal(engine.read_block(9), reference.read_block(3))
    np.testing.assert_array_equal(engine.read_block(11), reference.read_block(4))
    engine.copy_blocks(np.array([9, 10]), np.array([10, 9]))
    np.testing.assert_array_equal(engine.read_block(10), reference.read_block(3))
    np.testing.assert_array_equal(engine.read_block(9), reference.read_block(1))
    with pytest.raises(InvalidStepError, match="uint8"):
        engine.write_block(0, np.zeros(3, np.uint8))


def test_a_pool_grows_in_place_and_keeps_what_is_in_it(engine: TensorRtEngine, device: FakeDevice) -> None:
    engine.warm_up()
    before = generate(engine)
    block = engine.read_block(15)
    with pytest.raises(InvalidStepError, match=r"not in \[0, 64\)"):
        engine.read_block(NUM_BLOCKS)
    engine.grow(NUM_BLOCKS + 10)
    np.testing.assert_array_equal(engine.read_block(15), block)
    assert not engine.read_block(NUM_BLOCKS + 9).any()
    device.calls.clear()
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(before))
    assert "launch" not in device.calls
    engine.warm_up()
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(before))
    assert "launch" in device.calls
    with pytest.raises(ValueError, match="cannot shrink to 3"):
        engine.grow(3)
    with pytest.raises(ValueError, match="at most 129 blocks cannot grow to 131"):
        engine.grow(130)


def test_a_pool_that_cannot_grow_serves_the_blocks_it_has(model_path: Path) -> None:
    """The first region grows, the next ones find no memory: nothing that was there is lost."""
    spec = engine_spec(tiny_config())
    device = FakeDevice()
    engine = open_engine(device, model_path, max_num_blocks=4096)
    used = device.memory().total - device.memory().free
    device._total = used + PAGE * 8
    with pytest.raises(OutOfDeviceMemoryError, match="4097 KV blocks of 2048 bytes do not fit"):
        engine.grow(4096)
    assert engine.num_blocks == NUM_BLOCKS
    expected = generate(reference_engine(model_path, tiny_config()))
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(expected))
    assert spec.kv_bytes_per_block == 2048
    engine.close()
    device.check_nothing_is_left()


def test_closing_waits_for_what_is_queued(device: FakeDevice, model_path: Path) -> None:
    engine = open_engine(device, model_path)
    engine.submit(pack([Piece(FIRST, 0, 12, [3, 1, 4])], 4))
    engine.close()


def test_a_refused_step_queues_nothing(engine: TensorRtEngine, device: FakeDevice) -> None:
    step = pack([Piece(FIRST, 0, 12, [3, 1, 4])], 4)
    device.calls.clear()
    with pytest.raises(InvalidStepError, match=r"block_indices\[0\] is 64"):
        engine.execute(step._replace(block_indices=np.array([NUM_BLOCKS, 1, 4], np.int32)))
    assert device.calls == []


def test_a_step_that_could_not_be_run_leaves_the_engine_usable(device: FakeDevice, model_path: Path) -> None:
    spec = engine_spec(tiny_config())
    plan = FakePlan(device, model_path, spec)
    engine = TensorRtEngine(plan, device, spec, NUM_BLOCKS, kv_cache_dtype="float32")
    plan.fails = True
    with pytest.raises(PlanError, match="could not be run"):
        engine.execute(pack([Piece(FIRST, 0, 12, [3, 1, 4])], 4))
    plan.fails = False
    expected = generate(reference_engine(model_path, tiny_config()))
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(expected))
    engine.close()


def test_a_plan_of_another_network_is_refused_before_anything_is_allocated(
    device: FakeDevice, model_path: Path
) -> None:
    spec = engine_spec(tiny_config(num_hidden_layers=3))
    plan = FakePlan(device, model_path, engine_spec(tiny_config()))
    with pytest.raises(PlanError, match=r"inputs are not those of 3 layers: missing=.'key_cache_2', 'value_cache_2'"):
        TensorRtEngine(plan, device, spec, NUM_BLOCKS, kv_cache_dtype="float32")
    plan.outputs = ("logits",)
    with pytest.raises(PlanError, match=r"outputs are \['logits'\]; expected"):
        TensorRtEngine(plan, device, engine_spec(tiny_config()), NUM_BLOCKS, kv_cache_dtype="float32")


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "float8_e4m3fn"])
def test_pools_of_8_bits_are_bound_with_their_scales(kv_cache_dtype: str, device: FakeDevice, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint()
    model_path = write_tiny_network(checkpoint, tmp_path)
    spec = engine_spec(checkpoint.config, kv_cache_dtype=kv_cache_dtype)
    plan = FakePlan(device, model_path, spec, cache_dtype=KV_CACHE_DTYPES[kv_cache_dtype])
    engine = TensorRtEngine(plan, device, spec, NUM_BLOCKS, kv_cache_dtype=kv_cache_dtype)
    expected = generate(reference_engine(model_path, checkpoint.config, kv_cache_dtype=kv_cache_dtype))
    np.testing.assert_array_equal(np.concatenate(generate(engine)), np.concatenate(expected))
    engine.close()


def test_transfers_in_place_are_refused_by_name(engine: TensorRtEngine) -> None:
    with pytest.raises(UnsupportedFeatureError, match="pool in GPU memory"):
        engine.kv_regions()


def test_a_whole_executor_gives_the_tokens_of_the_reference(
    tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[7], [5, 6, 7, 8, 9], list(range(40, 90)), list(range(90, 60, -1))]

    def tokens() -> list[list[int]]:
        with Executor(tiny_engine_dir, ExecutorConfig()) as executor:
            return [tokens_of(responses) for responses in run(executor, *(request(prompt, 9) for prompt in prompts))]

    expected = tokens()
    device = FakeDevice()

    def open_on_device(directory: EngineDirectory, *, num_blocks: int, **_: object) -> TensorRtEngine:
        opened = spec_of_directory(directory)
        return TensorRtEngine(
            FakePlan(device, tiny_engine_dir / "model.onnx", opened),
            device,
            opened,
            min(num_blocks, 500),
            kv_cache_dtype="float32",
        )

    monkeypatch.setattr("executor.assembly.open_engine", open_on_device)
    assert tokens() == expected
    assert "launch" in device.calls
    device.check_nothing_is_left()
