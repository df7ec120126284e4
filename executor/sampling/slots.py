"""Per-sequence parameters in columns, one slot a sequence, so that a step looks them up for all rows at once."""

from __future__ import annotations

import secrets
from enum import IntFlag
from typing import TypeVar

import numpy as np

from executor.sampling.counter_random import stream_start
from executor.sampling.interface import SamplingSpec


class Needs(IntFlag):
    """What a sequence wants beyond the most likely token; a step does only what some row of it needs."""

    NOTHING = 0
    DRAW = 1
    """A random draw instead of the most likely token."""
    LOG_PROBS = 2
    GENERATION_LOGITS = 4


class Slots:
    """Columns of parameters. A slot holds one sequence; what its last owner left is overwritten by the next."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self.specs: list[SamplingSpec | None] = []
        self.needs = np.zeros(0, np.int64)
        self.temperature = np.zeros(0, np.float64)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.min_p = np.zeros(0, np.float64)
        self.stream = np.zeros(0, np.uint64)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of

    def open(self, request_id: int, spec: SamplingSpec) -> int:
        """Take a slot for a sequence and fill every column of it."""
        if request_id in self._slot_of:
            raise ValueError(f"request {request_id} is open already")
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of[request_id] = slot
        config = spec.config
        self.specs[slot] = spec
        self.needs[slot] = _needs(spec)
        self.temperature[slot] = 1.0 if config.is_greedy else _or(config.temperature, 1.0)
        self.top_k[slot] = _or(config.top_k, 0)
        self.top_p[slot] = _or(config.top_p, 0.0) or 1.0
        self.min_p[slot] = _or(config.min_p, 0.0)
        seed = secrets.randbits(64) if config.seed is None else config.seed
        self.stream[slot] = stream_start(seed, spec.sequence_index)
        return slot

    def close(self, request_id: int) -> int | None:
        """Give the sequence's slot back; returns it, or `None` where the sequence has none."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self.specs[slot] = None
            self._free.append(slot)
        return slot

    def slot_of(self, request_id: int) -> int:
        """Raises `KeyError` for a sequence that is not open."""
        return self._slot_of[request_id]

    def spec(self, slot: int) -> SamplingSpec:
        spec = self.specs[slot]
        if spec is None:
            raise KeyError(f"slot {slot} is free")
        return spec

    def _grow(self) -> None:
        old = len(self.specs)
        new = max(64, 2 * old)
        self.specs += [None] * (new - old)
        for name in ("needs", "temperature", "top_k", "top_p", "min_p", "stream"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(new - old, column.dtype)]))
        self._free = list(range(new - 1, old - 1, -1))


def _needs(spec: SamplingSpec) -> Needs:
    needs = Needs.NOTHING
    if not spec.config.is_greedy:
        needs |= Needs.DRAW
    if spec.return_log_probs or spec.num_top_log_probs:
        needs |= Needs.LOG_PROBS
    if spec.return_generation_logits:
        needs |= Needs.GENERATION_LOGITS
    return needs


_T = TypeVar("_T")


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
