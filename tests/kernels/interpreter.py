"""A process in which Triton kernels are interpreted: on the CPU, one program after the other.

Triton decides when a kernel is defined whether it will be compiled or interpreted, its own library's functions
included. So the setting is made in a new process, before anything there imports Triton.

Triton's interpreter does not have bfloat16 products (it multiplies bit patterns) and cuts where a GPU rounds to the
nearest. Both are put right here, by ml_dtypes, so that bytes can be compared. Its products are numpy's, whose bits
depend on the place of a row in a matrix; those made here do not, so that what differs is the kernels' doing.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def interpreting_process() -> ProcessPoolExecutor:
    """An executor of one process; functions submitted to it must be importable by name."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    interpreter._convert_float = _convert

    def create_dot(_builder: Any, left: Any, right: Any, added: Any, *_precision: Any) -> Any:
        return interpreter.TensorHandle(_product(_widened(left), _widened(right)) + added.data, added.dtype.scalar)

    def _widened(operand: Any) -> NDArray[np.float32]:
        is_bfloat16 = str(operand.dtype.scalar) == "bf16"
        values = operand.data.view(ml_dtypes.bfloat16) if is_bfloat16 else operand.data
        return np.asarray(values, np.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _product(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """`left @ right`, every element summed in one order."""
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for index in range(left.shape[1]):
        total += left[:, index, None] * right[index]
    return total


_NUMPY_TYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
}


def _convert(data: NDArray[Any], source: Any, target: Any, _rounding: Any) -> NDArray[Any]:
    """Round to the nearest, ties to even, as the hardware does; the result's bits."""
    values = np.ascontiguousarray(data).view(_NUMPY_TYPES[str(source)]).reshape(data.shape)
    rounded = values.astype(_NUMPY_TYPES[str(target)])
    return rounded.view(f"u{rounded.dtype.itemsize}")
