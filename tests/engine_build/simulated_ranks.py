"""The networks of several devices run side by side on one machine, their collectives simulated by threads that meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from engine_build.checkpoint.interface import Checkpoint
from engine_build.network import DOMAIN, MODEL_FILE, NetworkOptions, PagedAttention, write_network
from engine_build.network.llama import HIDDEN_STATES_INPUT, HIDDEN_STATES_OUTPUT
from engine_build.parallel import Rank

Feeds = dict[str, NDArray[np.generic]]


class _Meeting:
    """Every rank of a group hands a tensor in and gets those of all."""

    def __init__(self, size: int) -> None:
        self._tensors: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, index: int, tensor: NDArray[Any]) -> list[NDArray[Any]]:
        self._tensors[index] = tensor
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()  # nobody hands in the next one before all have taken these
        return tensors


def _collectives(meeting: _Meeting, index: int) -> list[type[OpRun]]:
    class AllReduce(OpRun):  # type: ignore[misc]
        op_domain = DOMAIN

        def _run(self, value: NDArray[Any], ranks: list[int]) -> tuple[NDArray[Any]]:  # noqa: ARG002
            return (np.sum(meeting.exchange(index, value), axis=0),)

    class AllGather(OpRun):  # type: ignore[misc]
        op_domain = DOMAIN

        def _run(self, value: NDArray[Any], ranks: list[int]) -> tuple[NDArray[Any]]:  # noqa: ARG002
            return (np.concatenate(meeting.exchange(index, value)),)

    return [AllReduce, AllGather]


class SimulatedRanks:
    """All devices of one model, with the pools that each of them has."""

    def __init__(
        self, checkpoint: Checkpoint, directory: Path, tp_size: int, pp_size: int, pool: tuple[int, int]
    ) -> None:
        """`pool` is the number of blocks, and of positions in one."""
        self.ranks = [Rank.of(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
        meetings = [_Meeting(tp_size) for _ in range(pp_size)]
        self.models, self._evaluators, self._caches = [], [], []
        for index, rank in enumerate(self.ranks):
            path = directory / f"rank{index}"
            path.mkdir(parents=True)
            write_network(checkpoint, NetworkOptions(), path, rank=rank)
            model = onnx.load(path / MODEL_FILE)
            operators = [PagedAttention, *_collectives(meetings[rank.pp_rank], rank.tp_rank)]
            self.models.append(model)
            self._evaluators.append(ReferenceEvaluator(model, new_ops=operators))
            shape = (pool[0], rank.config(checkpoint.config).num_key_value_heads, pool[1], checkpoint.config.head_size)
            self._caches.append(
                {value.name: np.zeros(shape, np.float32) for value in model.graph.input if "_cache_" in value.name}
            )

    def logits(self, inputs: Feeds) -> list[NDArray[np.float32]]:
        """One step: what each device of the last stage gives."""
        tp_size = self.ranks[0].tp_size
        results: list[NDArray[np.float32]] = []
        for first in range(0, len(self.ranks), tp_size):
            feeds = inputs | ({HIDDEN_STATES_INPUT: results[0]} if first else {})
            with ThreadPoolExecutor(tp_size) as pool:
                running = [pool.submit(self._run, rank, feeds) for rank in range(first, first + tp_size)]
            results = [done.result() for done in running]
        return results

    def _run(self, rank: int, inputs: Feeds) -> Any:
        model = self.models[rank]
        feeds = {value.name: (inputs | self._caches[rank])[value.name] for value in model.graph.input}
        (output,) = self._evaluators[rank].run(None, feeds)
        assert model.graph.output[0].name in ("logits", HIDDEN_STATES_OUTPUT)
        return output
