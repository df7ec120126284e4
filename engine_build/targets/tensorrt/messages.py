"""What a builder says while it works: its log, its progress, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ProgressCallback = Callable[[str, int, int], None]

_ADVICE = {
    "HW-specific datatypes": "that compute capability has no hardware for weight_dtype: choose another of the two",
    "OutOfMemory": "not enough memory: lower max_batch_size or max_seq_len, or build on a larger machine",
    "out of memory": "not enough memory: lower max_batch_size or max_seq_len, or build on a larger machine",
    "Could not find any implementation": "no kernel for this network on this device: try another dtype",
    "cudaError 35": "this needs a GPU on the machine that builds",
    "CUDA_SUCCESS": "this needs a GPU on the machine that builds",
}
"""Part of a builder's message -> what to do about it."""

_NOISE = "checkMacros.cpp::catchCudaError"
"""A line that follows every error on a machine without a GPU, and says nothing about it."""


def make_logger(trt: Any) -> Any:
    """An `ILogger` of the module that keeps errors in `.errors` and is silent otherwise."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR) and _NOISE not in message:
                self.errors.append(message)

    return Logger()


def make_progress_monitor(trt: Any, stage: str, report: ProgressCallback) -> Any:
    """An `IProgressMonitor` of the module that reports steps of the outermost phases as parts of `stage`.

    Ctrl-C while it runs ends the build at the next step, and leaves `.interrupted` true: an exception must not leave a
    callback.
    """

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._steps[phase_name] = num_steps
                self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                self._report(phase_name, step + 1)
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._steps:
                self._report(phase_name, self._steps.pop(phase_name))

        def _report(self, phase_name: str, done: int) -> None:
            try:
                report(f"{stage}: {phase_name}", done, max(done, self._steps.get(phase_name, done)))
            except KeyboardInterrupt:
                self.interrupted = True

    return ProgressMonitor()


def explain(errors: list[str]) -> str:
    """A builder's errors as one line: the first, which the others follow from, and what to do about it."""
    if not errors:
        return "it gives no reason"
    first = " ".join(errors[0].split())
    for part, advice in _ADVICE.items():
        if any(part in error for error in errors):
            return f"{advice} ({first})"
    return first
