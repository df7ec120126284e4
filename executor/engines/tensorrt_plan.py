"""A TensorRT plan and its execution contexts, as the engine uses them; `tensorrt` and `tensorrt_rtx` alike.

The Python bindings of TensorRT are imported by `load_plan` alone, and its runtime is made only once a GPU has been
found: without a driver it crashes the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from executor.engines.cuda.device import Address, Device, Stream


class PlanError(RuntimeError):
    """A plan that cannot be run here: names the file, and what is wrong with it."""


class Context(Protocol):
    """A plan made ready for one shape after another. Shapes and addresses hold until they are set again."""

    def set_shape(self, name: str, shape: Sequence[int]) -> None: ...

    def set_address(self, name: str, address: Address) -> None: ...

    def enqueue(self, stream: Stream) -> None:
        """Queue the network; returns at once. Raises `PlanError` when TensorRT refuses."""
        ...


class Plan(Protocol):
    """A loaded plan."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    profile_rows: tuple[int, ...]
    """For each optimization profile the most rows it takes."""
    activation_bytes: int
    """Memory that a context works in. Contexts that never run at once may share it."""
    can_be_captured: bool
    """Whether a context's work can be recorded in a CUDA graph, and takes block tables padded behind the last."""

    def create_context(self, profile: int, activations: Address, stream: Stream) -> Context: ...

    def close(self) -> None:
        """Let go of weights; no context may be used afterwards."""
        ...


def load_plan(
    path: Path,
    module: str,
    device: Device,  # noqa: ARG001 (that there is one proves that a runtime can be made)
    *,
    weights_fraction: float = 1.0,
) -> TensorRtPlan:
    """Load a plan file.

    Args:
        path: what `engine-build` wrote.
        module: `tensorrt` or `tensorrt_rtx`, which is installed.
        device: the GPU to run on, made this thread's current one.
        weights_fraction: part of the weights that stays on the device, in (0, 1]; below 1 for a plan built to stream
            them.

    Raises:
        PlanError: the file is no plan for this version and GPU, its pools are not written as the engine binds them, or
            so many weights do not fit.
    """
    return TensorRtPlan(importlib.import_module(module), path, weights_fraction)


class TensorRtPlan:
    """Implements `Plan`."""

    def __init__(self, trt: Any, path: Path, weights_fraction: float) -> None:
        self._trt, self._path = trt, path
        self._logger = _collecting_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise PlanError(f"{path} cannot be loaded by {trt.__name__} {trt.__version__}: {self._reason()}")
        self._engine = engine
        self._set_budget(weights_fraction)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = tuple(name for name in names if is_input[name])
        self.outputs = tuple(name for name in names if not is_input[name])
        self._check_aliases()
        read_by_host = [name for name in self.inputs if engine.is_shape_inference_io(name)]
        if read_by_host:
            raise PlanError(f"{path} reads the values of {', '.join(read_by_host)} on the host; none may be read so")
        profiles = range(engine.num_optimization_profiles)
        self.profile_rows = tuple(engine.get_tensor_profile_shape("input_ids", profile)[2][0] for profile in profiles)
        self.activation_bytes = max(engine.get_device_memory_size_for_profile_v2(profile) for profile in profiles)
        # What TensorRT-RTX allocates while it runs cannot be recorded, and its attention reads all of the tables.
        self.can_be_captured = trt.__name__ == "tensorrt"

    def create_context(self, profile: int, activations: Address, stream: Stream) -> Context:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise PlanError(f"{self._path} gives no execution context for profile {profile}: {self._reason()}")
        context.set_device_memory(activations, self.activation_bytes)
        return _TensorRtContext(context, self._path, self._reason)

    def close(self) -> None:
        del self._engine, self._runtime

    def _check_aliases(self) -> None:
        """Pools are bound once and written in place: a plan that keeps what it writes elsewhere would lose it.

        A plugin says that its output is its input. The layers of TensorRT-RTX do not, and take one address for both.
        """
        said_by_plan = self._trt.__name__ == "tensorrt"
        for output in self.outputs:
            pool = output.removesuffix("_out")
            expected = pool if pool in self.inputs else None
            found = self._engine.get_aliased_input_tensor(output) or None
            if found != expected and (said_by_plan or found is not None):
                raise PlanError(
                    f"{self._path} writes {output} {_place(found)}, and not {_place(expected)}: build it again"
                )

    def _set_budget(self, fraction: float) -> None:
        streamable = self._engine.streamable_weights_size
        if not streamable:
            if fraction != 1:
                raise PlanError(f"{self._path} was built without --weight_streaming: all its weights are on the GPU")
            return
        budget = int(streamable * fraction)
        self._engine.weight_streaming_budget_v2 = budget
        if self._engine.weight_streaming_budget_v2 != budget:
            raise PlanError(
                f"{budget} of {streamable} bytes of weights (gpu_weights_percent {fraction:g}) cannot be kept on the "
                f"GPU: {self._reason()}"
            )

    def _reason(self) -> str:
        errors = self._logger.errors
        return str(errors[-1]) if errors else "TensorRT gives no reason"


class _TensorRtContext:
    """Implements `Context`."""

    def __init__(self, context: Any, path: Path, reason: Any) -> None:
        self._context, self._path, self._reason = context, path, reason

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        if not self._context.set_input_shape(name, tuple(shape)):
            raise PlanError(f"{self._path} does not take {name} of shape {list(shape)}: {self._reason()}")

    def set_address(self, name: str, address: Address) -> None:
        if not self._context.set_tensor_address(name, address):
            raise PlanError(f"{self._path} does not take an address for {name}: {self._reason()}")

    def enqueue(self, stream: Stream) -> None:
        if not self._context.execute_async_v3(stream):
            raise PlanError(f"{self._path} could not be run: {self._reason()}")


def _place(tensor: str | None) -> str:
    return "to memory of its own" if tensor is None else f"over {tensor}"


def _collecting_logger(trt: Any) -> Any:
    """A logger that keeps errors, so that what we raise can give TensorRT's reason."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()
