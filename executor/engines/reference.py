"""The reference engine: the network's graph run operator by operator in torch. Small, plainly right: the oracle."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.api.errors import UnsupportedFeatureError
from executor.engines.cuda.step_buffers import spread
from executor.engines.interface import Engine, EngineSpec, InvalidStepError, PendingLogits, StepInputs
from executor.engines.openvino_padding import padded_sizes
from executor.engines.reference_cuda import cuda_operators
from executor.engines.reference_cuda_graphs import GenerationGraphs, Recorder
from executor.engines.reference_graph import ReferenceGraph, UnsupportedGraphError
from executor.engines.reference_kv_cache import KV_CACHE_DTYPES, block_shape
from executor.engines.reference_operators import OPERATORS
from executor.engines.validate import validate_block_ids, validate_step


class ReferenceEngine(Engine):
    """Implements `Engine` on a CPU or an NVIDIA GPU, for blocks of any size.

    There is a key and a value pool for each layer, laid out as `reference_kv_cache` says.
    """

    def __init__(
        self,
        model_path: Path,
        spec: EngineSpec,
        num_blocks: int,
        *,
        kv_cache_dtype: str = "float32",
        device: str = "cpu",
        deterministic: bool = False,
        recorder: Recorder | None = None,
        num_graph_sizes: int = 0,
    ) -> None:
        """Load the graph and allocate the pools.

        Args:
            model_path: `model.onnx`, its external data beside it.
            spec: what the graph was built for.
            num_blocks: blocks in the pool, at least 1.
            kv_cache_dtype: one of `KV_CACHE_DTYPES`: what the pool holds.
            device: `cpu` or `cuda`, or one of several GPUs, as `cuda:1`.
            recorder: `warm_up` records generation steps with it; `None`: nothing is recorded.
            num_graph_sizes: how many of the padded sizes are recorded; 0 for all.
            deterministic: on a GPU, a row's bits do not depend on what else is in the step. On a CPU they never do.

        Raises:
            UnsupportedGraphError: the file is no graph that this engine can run, or not one of `spec`.
            ValueError: `num_blocks`, `kv_cache_dtype`, `device` or `spec.kv_bytes_per_block` is wrong.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        dtype = KV_CACHE_DTYPES[kv_cache_dtype]
        shape = block_shape(spec.num_kv_heads, spec.tokens_per_block, spec.head_size, dtype)
        bytes_per_block = 2 * spec.num_layers * dtype.itemsize * int(np.prod(shape))
        if spec.kv_bytes_per_block != bytes_per_block:
            raise ValueError(
                f"spec.kv_bytes_per_block is {spec.kv_bytes_per_block}, but a block of {spec.tokens_per_block} tokens, "
                f"{spec.num_layers} layers, {spec.num_kv_heads} heads of {spec.head_size} in {kv_cache_dtype} takes "
                f"{bytes_per_block}"
            )
        self.spec = spec
        self.num_blocks = num_blocks
        self._device = _usable(device)
        is_cuda = self._device.type == "cuda"
        operators = cuda_operators(self._device, deterministic=deterministic) if is_cuda else OPERATORS
        self._graph = ReferenceGraph(Path(model_path), self._device, operators)
        num_memory_blocks = num_blocks if recorder is None else num_blocks + 1  # padding is written into the last one
        self._pools: dict[str, Tensor] = {
            f"{kind}_cache_{layer}": torch.zeros((num_memory_blocks, *shape), dtype=dtype, device=self._device)
            for layer in range(spec.num_layers)
            for kind in ("key", "value")
        }
        # Not every type can be indexed by torch; bytes can.
        self._bytes = [pool.view(torch.uint8).reshape(num_memory_blocks, -1) for pool in self._pools.values()]
        self._graphs: GenerationGraphs | None = None
        if recorder is not None:
            sizes = spread(padded_sizes(spec.max_batch_size, 1), num_graph_sizes)
            self._graphs = GenerationGraphs(self._run, recorder, spec, sizes, num_blocks, self._device)
        expected = {*StepInputs._fields, "max_context_len", *self._pools}
        if set(self._graph.inputs) != expected:
            raise UnsupportedGraphError(
                f"{model_path} takes inputs that a network of {spec.num_layers} layers does not take: "
                f"missing {sorted(expected - set(self._graph.inputs))}, "
                f"unknown {sorted(set(self._graph.inputs) - expected)}"
            )

    def submit(self, inputs: StepInputs) -> PendingLogits:
        """See `Engine.submit`. Logits are computed in the graph's own precision: here on a CPU, beside it on a GPU."""
        validate_step(inputs, self.spec, self.num_blocks)
        with torch.inference_mode():
            recorded = None if self._graphs is None else self._graphs.run(inputs)
            logits = self._run(self._tensors(inputs)) if recorded is None else recorded

        def wait() -> NDArray[np.float32]:
            result: NDArray[np.float32] = logits.float().cpu().numpy()
            return result

        return wait

    def padded_rows(self, num_rows: int) -> int:
        """See `Engine.padded_rows`: as if the step were a generation step; nothing else is padded."""
        if self._graphs is None or num_rows > self._graphs.sizes[-1]:
            return num_rows
        return self._graphs.sizes[bisect_left(self._graphs.sizes, num_rows)]

    def warm_up(self) -> None:
        """Record generation steps, where there is a recorder."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.record()

    def copy_blocks(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Engine.copy_blocks`. All sources are read before a target is written."""
        validate_block_ids(sources, self.num_blocks)
        validate_block_ids(targets, self.num_blocks)
        source_ids, target_ids = (torch.from_numpy(ids).to(self._device) for ids in (sources, targets))
        for memory in self._bytes:
            memory[target_ids] = memory[source_ids]

    def read_block(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """See `Engine.read_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        data: NDArray[np.uint8] = torch.cat([memory[block_id] for memory in self._bytes]).cpu().numpy()
        if out is None:
            return data
        np.copyto(out, data)
        return out

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """See `Engine.write_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        if data.dtype != np.uint8 or data.shape != (self.spec.kv_bytes_per_block,):
            raise InvalidStepError(
                f"block data is {data.dtype}{list(data.shape)}; it must be uint8[{self.spec.kv_bytes_per_block}]"
            )
        parts = torch.from_numpy(data.copy()).to(self._device).chunk(len(self._bytes))
        for memory, part in zip(self._bytes, parts, strict=True):
            memory[block_id] = part

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """See `Engine.kv_regions`."""
        if self._device.type != "cpu":
            raise UnsupportedFeatureError(
                f"transfers from a pool on {self._device} are not supported; only pools in main memory are"
            )
        return [memory.numpy() for memory in self._bytes]

    def close(self) -> None:
        """Let go of pools and weights; the engine cannot run afterwards."""
        self._graphs = None
        self._pools.clear()
        self._bytes.clear()
        del self._graph

    def _tensors(self, inputs: StepInputs) -> dict[str, Tensor]:
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in inputs._asdict().items()}
        context_lens = inputs.past_lens + np.diff(inputs.subsequence_begins)
        # On the host: it decides what is launched.
        return tensors | {"max_context_len": torch.tensor(int(context_lens.max()), dtype=torch.int32)}

    def _run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        (logits,) = self._graph.run({**tensors, **self._pools})
        return logits


def default_device() -> str:
    """`cuda` where torch can use a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device: str) -> int:
    """Bytes that are free on a GPU."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _usable(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for the device
        raise ValueError(f"device is {name!r}, which torch cannot use here: {error}") from error
    return device
