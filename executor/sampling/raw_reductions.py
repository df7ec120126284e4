"""What log probabilities need of whole rows, computed by OpenVINO beside the interpreter.

```
logits [R, vocab] ─┬─► maximum of each fine group        [R, fine groups]     for the most likely tokens
   (raw)           └─► exp ─► sum over each sum group    [R, sum groups]      ─► logarithm of their sum [R]
```

Groups are those of `row_passes.py`, which is the definition. Here all cores work on it, without the interpreter lock:
the maxima while the edits of the rows are gathered, the sums while the most likely tokens are ranked. What comes out
for a row depends on that row alone, to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.sampling.row_passes import Maxima, RowPasses, is_exact, totals_of

if TYPE_CHECKING:
    import openvino

_LOWEST = np.finfo(np.float32).min


class RawReducer:
    """Reduces a run of rows at a time: `start_maxima`, `maxima`, `start_sums`, `normalizers`, in this order."""

    def __init__(self, passes: RowPasses, num_threads: int | None = None) -> None:
        """Compile for the vocabulary.

        Args:
            passes: what the groups are, and what redoes sums that leave the range of float32.
            num_threads: CPU threads; `None`: one for each core.
        """
        self._passes = passes
        self._maxima, self._sums = (
            compiled.create_infer_request()
            for compiled in _compiled(passes.vocab_size, passes.fine_groups, passes.sum_groups, num_threads)
        )
        self._logits: NDArray[np.float32] = np.empty((0, passes.vocab_size), np.float32)

    def start_maxima(self, logits: NDArray[np.float32]) -> None:
        """Begin with `logits` `[R, vocab]`, C-contiguous; they must not change until `normalizers` returns."""
        self._logits = logits
        _start(self._maxima, logits)

    def maxima(self) -> Maxima:
        """Wait for the group maxima of R rows, valid until the next `start_maxima`. A NaN may be passed over."""
        self._maxima.wait()
        fine: NDArray[np.float32] = self._maxima.get_output_tensor().data
        # Of a group of -inf alone, OpenVINO's maximum is the lowest number.
        fine[fine <= _LOWEST] = -np.inf
        return Maxima.of(fine)

    def start_sums(self) -> None:
        _start(self._sums, self._logits)

    def normalizers(self) -> NDArray[np.float64]:
        """Wait for the logarithms `[R]` of the sums of exponentials: not finite where a row holds NaN or +inf, or
        -inf alone."""
        self._sums.wait()
        totals = totals_of(self._sums.get_output_tensor().data)
        shifts = np.zeros(len(totals))
        again = np.flatnonzero(~is_exact(totals))
        if again.size:
            sums = self._passes.weight_sums(self._logits, again, np.ones(len(again)))
            totals[again], shifts[again] = sums.totals, sums.shifts
        with np.errstate(all="ignore"):
            normalizers: NDArray[np.float64] = shifts + np.log(totals)
        return normalizers


def _start(request: openvino.InferRequest, logits: NDArray[np.float32]) -> None:
    import openvino

    request.set_input_tensor(openvino.Tensor(logits, shared_memory=True))
    request.start_async()


@lru_cache
def _compiled(
    vocab_size: int, fine_groups: int, sum_groups: int, num_threads: int | None
) -> tuple[openvino.CompiledModel, openvino.CompiledModel]:
    """Networks from logits to group maxima, and to sums of exponentials over groups."""
    import openvino
    from openvino import opset13

    logits = opset13.parameter([-1, vocab_size], np.float32)
    members = opset13.constant(np.array([1], np.int64))
    maxima = opset13.reduce_max(_by_group(logits, vocab_size, fine_groups), members)
    sums = opset13.reduce_sum(opset13.exp(_by_group(logits, vocab_size, sum_groups)), members)
    settings: dict[str, str | int] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    if num_threads is not None:
        settings["INFERENCE_NUM_THREADS"] = num_threads
    core = openvino.Core()
    first, second = (
        core.compile_model(openvino.Model([output], [logits], name), "CPU", settings)
        for name, output in (("group_maxima", maxima), ("exponential_sums", sums))
    )
    return first, second


def _by_group(logits: Any, vocab_size: int, groups: int) -> Any:
    """`[R, vocab]` to `[R, members, groups]`; missing last members are -inf."""
    from openvino import opset13

    missing = -vocab_size % groups
    if missing:
        begins, ends = (opset13.constant(np.array([0, width], np.int64)) for width in (0, missing))
        logits = opset13.pad(logits, begins, ends, "constant", opset13.constant(np.float32(-np.inf)))
    shape = opset13.constant(np.array([0, (vocab_size + missing) // groups, groups], np.int64))
    return opset13.reshape(logits, shape, special_zero=True)
