"""What we call of NVIDIA's packages exists in them, and what is said where there is no GPU."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest
from cuda.bindings import driver, runtime

from executor.engines import tensorrt_plan
from executor.engines.cuda import bindings
from executor.engines.cuda.bindings import open_device
from executor.engines.cuda.device import Device, NoGpuError
from tests.executor.fake_cuda import FakeDevice


def attributes_of(source: str, owners: set[str]) -> set[str]:
    """Names looked up on one of `owners`, as in `driver.x` and `self._driver.x`; in `driver.x.y` the first of them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner.lstrip("_") in owners:
                names.add(node.attr)
    return names


@pytest.mark.parametrize(("module", "name"), [(driver, "driver"), (runtime, "runtime")])
def test_every_function_of_cuda_that_we_call_exists(module: object, name: str) -> None:
    used = attributes_of(inspect.getsource(bindings), {name}) - {name}
    assert len(used) > 8
    assert [attribute for attribute in sorted(used) if not hasattr(module, attribute)] == []


def test_every_method_of_tensorrt_that_we_call_exists() -> None:
    """Checked against TensorRT-RTX, whose classes are those of TensorRT."""
    trt = importlib.import_module("tensorrt_rtx")
    source = inspect.getsource(tensorrt_plan)
    for owner, cls in (("engine", trt.ICudaEngine), ("context", trt.IExecutionContext), ("runtime", trt.Runtime)):
        used = attributes_of(source, {owner})
        assert used
        assert [name for name in sorted(used) if not hasattr(cls, name)] == []
    for name in attributes_of(source, {"trt"}) - {"__name__", "__version__"}:
        assert hasattr(trt, name)
    assert hasattr(trt.ExecutionContextAllocationStrategy, "USER_MANAGED")


def test_both_devices_have_what_an_engine_asks_for() -> None:
    asked = {name for name, member in vars(Device).items() if inspect.isfunction(member) and name[0] != "_"}
    for implementation in (bindings.BindingsDevice, FakeDevice):
        for name in asked:
            ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (implementation, Device))
            assert list(ours.parameters) == list(theirs.parameters), f"{implementation.__name__}.{name}"


def test_without_a_driver_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (runtime.cudaError_t.cudaErrorInsufficientDriver, None)
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: answer)
    with pytest.raises(NoGpuError, match=r"cudaErrorInsufficientDriver\): a driver of CUDA 13"):
        open_device()
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (runtime.cudaError_t.cudaSuccess, 2))
    with pytest.raises(NoGpuError, match="there is no GPU 2: the driver finds 2"):
        open_device(2)
