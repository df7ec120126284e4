"""Per-sequence parameters in a table, one slot a sequence, so that a step looks them up for all rows at once."""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from executor.sampling.counter_random import stream_start
from executor.sampling.interface import SamplingSpec
from executor.sampling.sequence_state import SequenceState


class Needs:
    """What a sequence wants beyond the most likely token; a step does only what some row of it needs. Bits of an
    integer, and not an `IntFlag`: they are looked at for every row."""

    DRAW: Final = 1
    """A random draw instead of the most likely token."""
    EDITS: Final = 2
    """Changes to single logits, or a `top_p`, that depend on its history."""
    ROW_EDITS: Final = 4
    """Changes to whole rows: a dense bias, post-processors, a grammar."""
    LOG_PROBS: Final = 8
    GENERATION_LOGITS: Final = 16

    STATE: Final = EDITS | ROW_EDITS
    """The sampler must follow its tokens."""
    RAW_LOGITS: Final = LOG_PROBS | GENERATION_LOGITS
    """The logits must be there again, after the draw, as they were before any edit."""


_SLOT = np.dtype(
    [
        ("needs", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("stream", np.uint64),
        ("num_top_log_probs", np.int64),
    ]
)


class Slots:
    """A slot holds one sequence; opening one writes every field of it, so nothing of its last owner is left."""

    def __init__(self) -> None:
        self.table: NDArray[Any] = np.zeros(0, _SLOT)
        """One record a slot."""
        self._slot_of: dict[int, int] = {}
        self._states: list[SequenceState | None] = []
        self._free: list[int] = []

    def open(self, request_id: int, spec: SamplingSpec) -> None:
        """Take a slot. Raises `ValueError` where the sequence has one."""
        if request_id in self._slot_of:
            raise ValueError(f"request {request_id} is open already")
        state = SequenceState(spec)
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of[request_id] = slot
        self._states[slot] = state
        config = spec.config
        seed = secrets.randbits(64) if config.seed is None else config.seed
        self.table[slot] = (
            _needs(spec, state),
            config.temperature or 1.0,
            config.top_k or 0,
            config.top_p or 1.0,
            config.min_p or 0.0,
            stream_start(seed, spec.sequence_index),
            spec.num_top_log_probs,
        )

    def close(self, request_id: int) -> None:
        """Give the slot back; a sequence without one is left alone."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._states[slot] = None
            self._free.append(slot)

    def find(self, request_ids: list[int]) -> list[int]:
        """Slots of sequences. Raises `KeyError` for one that is not open."""
        return [self._slot_of[request_id] for request_id in request_ids]

    def state(self, slot: int) -> SequenceState:
        """The owner's state. Raises `KeyError` for a free slot."""
        state = self._states[slot]
        if state is None:
            raise KeyError(f"slot {slot} is free")
        return state

    def _grow(self) -> None:
        old = len(self.table)
        more = max(64, old)
        self.table = np.concatenate([self.table, np.zeros(more, _SLOT)])
        self._states += [None] * more
        self._free = list(range(old + more - 1, old - 1, -1))


def _needs(spec: SamplingSpec, state: SequenceState) -> int:
    needs = 0
    if not spec.config.is_greedy:
        needs |= Needs.DRAW
    if state.has_edits:
        needs |= Needs.EDITS
    if state.has_row_edits:
        needs |= Needs.ROW_EDITS
    if spec.return_log_probs or spec.num_top_log_probs:
        needs |= Needs.LOG_PROBS
    if spec.return_generation_logits:
        needs |= Needs.GENERATION_LOGITS
    return needs
