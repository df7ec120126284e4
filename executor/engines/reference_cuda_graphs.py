"""Generation steps of the reference engine, recorded once for each padded size: then a step is one launch.

```
step of 6 rows ─ pad to 8 ─ copy into the tensors that were recorded with ─ replay ─ its first 6 rows of logits
```

All other steps run operator by operator. What records is handed in: a CUDA graph on a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from executor.engines.cuda.step_buffers import blocks_per_sequence, is_generation, pad_generation
from executor.engines.interface import EngineSpec, StepInputs

Run = Callable[[Mapping[str, Tensor]], Tensor]
"""The inputs of a step without the pools, and the longest context, to logits `[S, vocab_size]`."""


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work at least once; what is given does it again, on the same memory."""
        ...


class CudaRecorder:
    """Implements `Recorder` with CUDA graphs, which share their memory: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            # Kernels are compiled and libraries made ready before: neither can be recorded.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


class _Recorded(NamedTuple):
    inputs: dict[str, Tensor]
    logits: list[Tensor]
    """One tensor, `[size, vocab_size]`."""
    replay: Callable[[], None]


class GenerationGraphs:
    """Recorded steps by size."""

    def __init__(
        self,
        run: Run,
        recorder: Recorder,
        spec: EngineSpec,
        sizes: Sequence[int],
        scratch_block: int,
        device: torch.device,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            run: computes a step without reading anything back.
            recorder: of the device.
            spec: of the engine.
            sizes: rows of the steps to record, ascending.
            scratch_block: what padding writes into.
            device: where inputs are.
        """
        self._run, self._recorder, self._device = run, recorder, device
        self.sizes = sizes
        self._scratch_block, self._entries = scratch_block, blocks_per_sequence(spec)
        self._longest = torch.tensor(spec.max_seq_len, dtype=torch.int32)  # in main memory: it decides what is launched
        self._recorded: dict[int, _Recorded] = {}

    def record(self) -> None:
        """Record every size that was not, the largest first, whose memory the others fit into."""
        for size in reversed(self.sizes):
            if size not in self._recorded:
                self._recorded[size] = self._record(size)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Logits of a step, `[S, vocab_size]`; `None` for one that no graph computes."""
        num_rows = len(inputs.input_ids)
        if not is_generation(inputs) or num_rows > self.sizes[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        if size not in self._recorded or len(inputs.block_indices) + size - num_rows > size * self._entries:
            return None
        recorded = self._recorded[size]
        for name, array in self._padded(inputs, size)._asdict().items():
            recorded.inputs[name].copy_(torch.from_numpy(array))
        recorded.replay()
        return recorded.logits[0][:num_rows].clone()  # the next replay writes there

    def _record(self, size: int) -> _Recorded:
        zeros, begins = np.zeros(1, np.int64), np.array([0, 1], np.int32)
        blocks = np.array([self._scratch_block], np.int32)
        step = StepInputs(zeros, zeros, zeros.astype(np.int32), begins, blocks, begins, zeros)
        arrays = self._padded(step, size)._asdict()
        inputs = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        logits: list[Tensor] = []

        def work() -> None:
            logits[:] = [self._run(inputs | {"max_context_len": self._longest})]

        return _Recorded(inputs, logits, self._recorder.record(work))

    def _padded(self, inputs: StepInputs, size: int) -> StepInputs:
        return pad_generation(inputs, size, self._scratch_block, self._entries)
