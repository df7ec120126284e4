"""What log probabilities need of whole rows, computed by OpenVINO in one go.

```
logits [R, vocab] ─┬─► maximum of each fine group        [R, fine groups]     for the most likely tokens
   (raw)           └─► exp ─► sum over each sum group    [R, sum groups]      ─► logarithm of their sum [R]
```

Groups are those of `row_passes.py`, which is the definition. Here all cores work on it, without the interpreter lock.
What comes out for a row depends on that row alone, to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.sampling.row_passes import Maxima, RowPasses, is_exact, totals_of

if TYPE_CHECKING:
    import openvino

_LOWEST = np.finfo(np.float32).min


class RawReductions(NamedTuple):
    """Of R raw rows."""

    maxima: Maxima
    """Valid until the next `reduce`. A NaN may be passed over."""
    normalizers: NDArray[np.float64]
    """[R] logarithms of the sums of exponentials: not finite where a row holds NaN or +inf, or -inf alone."""


class RawReducer:
    """Reduces a run of rows."""

    def __init__(self, passes: RowPasses, num_threads: int | None = None) -> None:
        """Prepare.

        Args:
            passes: what the groups are, and what redoes sums that leave the range of float32.
            num_threads: CPU threads; `None`: one for each core.
        """
        self._passes = passes
        self._request = _compiled(
            passes.vocab_size, passes.fine_groups, passes.sum_groups, num_threads
        ).create_infer_request()

    def reduce(self, logits: NDArray[np.float32]) -> RawReductions:
        """Of `logits` `[R, vocab]`, C-contiguous."""
        import openvino

        self._request.set_input_tensor(openvino.Tensor(logits, shared_memory=True))
        self._request.start_async()  # not infer(), which copies what comes out
        self._request.wait()
        fine: NDArray[np.float32] = self._request.get_output_tensor(0).data
        # Of a group of -inf alone, OpenVINO's maximum is the lowest number.
        fine[fine <= _LOWEST] = -np.inf
        return RawReductions(Maxima.of(fine), self._normalizers(logits, self._request.get_output_tensor(1).data))

    def _normalizers(self, logits: NDArray[np.float32], sums: NDArray[np.float32]) -> NDArray[np.float64]:
        totals = totals_of(sums)
        shifts = np.zeros(len(totals))
        again = np.flatnonzero(~is_exact(totals))
        if again.size:
            shifted = self._passes.weight_sums(logits, again, np.ones(len(again)))
            totals[again], shifts[again] = shifted.totals, shifted.shifts
        with np.errstate(all="ignore"):
            normalizers: NDArray[np.float64] = shifts + np.log(totals)
        return normalizers


@lru_cache
def _compiled(vocab_size: int, fine_groups: int, sum_groups: int, num_threads: int | None) -> openvino.CompiledModel:
    """A network from logits to group maxima, and to sums of exponentials over groups."""
    import openvino
    from openvino import opset13

    logits = opset13.parameter([-1, vocab_size], np.float32)
    members = opset13.constant(np.array([1], np.int64))
    maxima = opset13.reduce_max(_by_group(logits, vocab_size, fine_groups), members)
    sums = opset13.reduce_sum(opset13.exp(_by_group(logits, vocab_size, sum_groups)), members)
    settings: dict[str, str | int] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    if num_threads is not None:
        settings["INFERENCE_NUM_THREADS"] = num_threads
    return openvino.Core().compile_model(openvino.Model([maxima, sums], [logits], "raw"), "CPU", settings)


def _by_group(logits: Any, vocab_size: int, groups: int) -> Any:
    """`[R, vocab]` to `[R, members, groups]`; missing last members are -inf."""
    from openvino import opset13

    missing = -vocab_size % groups
    if missing:
        begins, ends = (opset13.constant(np.array([0, width], np.int64)) for width in (0, missing))
        logits = opset13.pad(logits, begins, ends, "constant", opset13.constant(np.float32(-np.inf)))
    shape = opset13.constant(np.array([0, (vocab_size + missing) // groups, groups], np.int64))
    return opset13.reshape(logits, shape, special_zero=True)
