"""Keeps the tensors of each step for people who look for a fault: in memory, or in files.

The engine's own inputs have their own names. Upstream's names are there as well, for what means the same here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batch_manager import IterationPlan, Phase
from executor.api.config import DebugConfig
from executor.api.errors import InvalidRequestError
from executor.api.stats import DebugTensorsPerIteration
from executor.engines.interface import StepInputs
from executor.model_runner import StepLogits

_logger = logging.getLogger(__name__)

_Array = NDArray[Any]


def _sequence_length(_plan: IterationPlan, inputs: StepInputs) -> _Array:
    return inputs.past_lens + np.diff(inputs.subsequence_begins)


def _context_lengths(plan: IterationPlan, _inputs: StepInputs) -> _Array:
    return np.array([item.request.num_prompt_tokens for item in plan.scheduled], np.int32)


def _request_types(plan: IterationPlan, _inputs: StepInputs) -> _Array:
    return np.array([item.phase is Phase.GENERATION for item in plan.scheduled], np.int32)


def _block_offsets(_plan: IterationPlan, inputs: StepInputs) -> _Array:
    lengths = np.diff(inputs.block_indices_begins)
    tables = np.full((len(lengths), lengths.max()), -1, np.int32)
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = inputs.block_indices
    return np.repeat(tables[None, :, None], 2, axis=2)


_INPUTS: dict[str, Callable[[IterationPlan, StepInputs], _Array]] = {
    "input_ids": lambda _, inputs: inputs.input_ids,
    "position_ids": lambda _, inputs: inputs.position_ids,
    "past_lens": lambda _, inputs: inputs.past_lens,
    "subsequence_begins": lambda _, inputs: inputs.subsequence_begins,
    "block_indices": lambda _, inputs: inputs.block_indices,
    "block_indices_begins": lambda _, inputs: inputs.block_indices_begins,
    "sampled_rows": lambda _, inputs: inputs.sampled_rows,
    "sequence_length": _sequence_length,
    "context_lengths": _context_lengths,
    "host_context_lengths": _context_lengths,
    "last_token_ids": lambda _, inputs: inputs.subsequence_begins[1:],
    "host_request_types": _request_types,
    "host_past_key_value_lengths": lambda _, inputs: inputs.past_lens,
    "kv_cache_block_offsets": _block_offsets,
}
_LOGITS = "logits"

TENSOR_NAMES = {
    "input_ids": "[T] int64: token ids, sequences packed one behind the other",
    "position_ids": "[T] int64: positions",
    "past_lens": "[B] int32: tokens of each sequence whose K and V are in the pool",
    "subsequence_begins": "[B + 1] int32: first row of each sequence, then T",
    "block_indices": "[N] int32: block tables, one behind the other",
    "block_indices_begins": "[B + 1] int32: first entry of each block table, then N",
    "sampled_rows": "[S] int64: rows whose logits are computed",
    "sequence_length": "[B] int32: tokens of each sequence after the step",
    "context_lengths": "[B] int32: tokens of each prompt",
    "host_context_lengths": "[B] int32: the same",
    "last_token_ids": "[B] int32: one more than the last row of each sequence",
    "host_request_types": "[B] int32: 0 context, 1 generation",
    "host_past_key_value_lengths": "[B] int32: as past_lens",
    "kv_cache_block_offsets": "[1, B, 2, longest table] int32: block ids of keys and of values (the same); -1: none",
    "logits": "[S, vocab] float32: the engine's output",
}
"""Every tensor that can be kept: its shape for T rows of B sequences, S of them sampled, and what it holds."""


class DebugTensors:
    """What `DebugConfig` asks for. Recorded by the loop's thread, taken by any."""

    def __init__(self, config: DebugConfig) -> None:
        """Raises `InvalidRequestError` for a tensor that there is not, by name."""
        names = [*(config.debug_tensor_names or ())]
        for name in names:
            if name not in TENSOR_NAMES:
                raise InvalidRequestError(
                    f"debug_config.debug_tensor_names holds {name!r}; there are {', '.join(TENSOR_NAMES)}",
                    field="debug_config.debug_tensor_names",
                )
        if config.debug_input_tensors:
            names += _INPUTS
        if config.debug_output_tensors:
            names.append(_LOGITS)
        self._names = dict.fromkeys(names)
        self._kept: deque[DebugTensorsPerIteration] = deque(maxlen=config.debug_tensors_max_iterations)
        self._lock = threading.Lock()
        self._dump_dir: Path | None = None
        if not config.debug_tensors_max_iterations:
            self._dump_dir = Path(config.dump_dir, "PP_1", "TP_1")

    def record(self, plan: IterationPlan, step: StepLogits) -> None:
        """Keep or write one step's tensors. A file that cannot be written is logged, and ends the writing."""
        if not self._names:
            return
        tensors = {
            name: np.array(step.logits if name == _LOGITS else _INPUTS[name](plan, step.inputs)) for name in self._names
        }
        if self._dump_dir is not None:
            self._write(plan.iteration, tensors, self._dump_dir)
            return
        with self._lock:
            self._kept.append(DebugTensorsPerIteration(plan.iteration, tensors))

    def take(self) -> list[DebugTensorsPerIteration]:
        """Iterations since the last call, as many as are kept."""
        with self._lock:
            taken = list(self._kept)
            self._kept.clear()
            return taken

    def _write(self, iteration: int, tensors: dict[str, _Array], dump_dir: Path) -> None:
        directory = dump_dir / f"iteration_{iteration}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, tensor in tensors.items():
                np.save(directory / f"{name}.npy", tensor)
        except OSError:
            _logger.exception("debug tensors are not written any more")
            self._names.clear()
