"""What is checked of a plan when it is loaded, on a stand-in of TensorRT: its runtime needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.engines.tensorrt_plan import PlanError, TensorRtPlan

OUTPUTS = ("logits", "key_cache_0_out", "value_cache_0_out")
ALIASES = {"logits": "", "key_cache_0_out": "key_cache_0", "value_cache_0_out": "value_cache_0"}


class FakeEngine:
    """Stands in for `ICudaEngine`: what `TensorRtPlan` asks when it loads."""

    num_optimization_profiles = 1

    def __init__(self, aliases: dict[str, Any], streamable: int, most_on_device: int) -> None:
        self._names = ("input_ids", "key_cache_0", "value_cache_0", *OUTPUTS)
        self.num_io_tensors = len(self._names)
        self._aliases = aliases
        self.streamable_weights_size = streamable
        self._most_on_device = most_on_device
        self._budget = 0

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if budget <= self._most_on_device:
            self._budget = budget

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "output" if name in OUTPUTS else "input"

    def get_aliased_input_tensor(self, name: str) -> str | None:
        alias: str | None = self._aliases[name]
        return alias

    def is_shape_inference_io(self, _name: str) -> bool:
        return False

    def get_tensor_profile_shape(self, _name: str, _profile: int) -> list[tuple[int, ...]]:
        return [(1,), (8,), (64,)]

    def get_device_memory_size_for_profile_v2(self, _profile: int) -> int:
        return 100


class FakeLogger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)


def load(
    directory: Path,
    *,
    module: str = "tensorrt",
    aliases: dict[str, Any] | None = None,
    streamable: int = 0,
    most_on_device: int = 0,
    weights_fraction: float = 1.0,
) -> tuple[TensorRtPlan, FakeEngine]:
    path = directory / "rank0.engine"
    path.write_bytes(b"plan")
    engine = FakeEngine(ALIASES | (aliases or {}), streamable, most_on_device)
    trt = SimpleNamespace(
        __name__=module,
        __version__="11.4",
        ILogger=FakeLogger,
        Runtime=lambda _logger: SimpleNamespace(deserialize_cuda_engine=lambda _bytes: engine),
        TensorIOMode=SimpleNamespace(INPUT="input"),
    )
    return TensorRtPlan(trt, path, weights_fraction), engine


def test_a_plan_whose_pools_are_written_in_place_is_taken(tmp_path: Path) -> None:
    plan, _ = load(tmp_path)
    assert plan.outputs == OUTPUTS
    assert plan.can_be_captured


@pytest.mark.parametrize(
    ("alias", "place"),
    [("", "to memory of its own"), (None, "to memory of its own"), ("key_cache_0", "over key_cache_0")],
)
def test_a_pool_that_is_not_written_over_itself_is_refused(tmp_path: Path, alias: str | None, place: str) -> None:
    said = rf"rank0\.engine writes value_cache_0_out {place}, and not over value_cache_0: build it again"
    with pytest.raises(PlanError, match=said):
        load(tmp_path, aliases={"value_cache_0_out": alias})


@pytest.mark.parametrize("module", ["tensorrt", "tensorrt_rtx"])
def test_logits_over_an_input_are_refused(tmp_path: Path, module: str) -> None:
    with pytest.raises(PlanError, match="writes logits over key_cache_0, and not to memory of its own"):
        load(tmp_path, module=module, aliases={"logits": "key_cache_0"})


def test_layers_of_tensorrt_rtx_need_not_say_where_they_write_but_must_not_say_another_place(tmp_path: Path) -> None:
    load(tmp_path, module="tensorrt_rtx", aliases=dict.fromkeys(OUTPUTS, ""))
    with pytest.raises(PlanError, match="writes value_cache_0_out over key_cache_0, and not over value_cache_0"):
        load(tmp_path, module="tensorrt_rtx", aliases={"value_cache_0_out": "key_cache_0"})


def test_so_much_of_the_weights_stays_on_the_device(tmp_path: Path) -> None:
    _, engine = load(tmp_path, streamable=1000, most_on_device=1000)
    assert engine.weight_streaming_budget_v2 == 1000
    _, engine = load(tmp_path, streamable=1000, most_on_device=600, weights_fraction=0.5)
    assert engine.weight_streaming_budget_v2 == 500
    with pytest.raises(PlanError, match=r"800 of 1000 bytes of weights \(gpu_weights_percent 0.8\) cannot be kept"):
        load(tmp_path, streamable=1000, most_on_device=600, weights_fraction=0.8)
    with pytest.raises(PlanError, match="was built without --weight_streaming"):
        load(tmp_path, weights_fraction=0.8)
