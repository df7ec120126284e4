"""The OpenVINO engine: the network on the CPU, keys and values in a paged pool of our own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
from numpy.typing import NDArray

from executor.engines.interface import Engine, EngineSpec, PendingLogits, StepInputs
from executor.engines.openvino_compile import OpenVinoError, compile_network
from executor.engines.openvino_padding import pad_step, padded_size, padded_sizes
from executor.engines.openvino_pool import KvPool
from executor.engines.validate import validate_block_ids, validate_step

_SMALLEST_STEP = 2
"""Rows. A step of one row is computed by other kernels than one of two and more, whose sums come in another order."""

_SMALLEST_DETERMINISTIC_STEP = 8
"""Rows. With 8-bit weights, kernels for up to 4 rows differ from those for more (measured on a CPU with AMX)."""


_LARGEST_VERIFICATION = 64
"""Sampled rows of one sequence with drafts: longer ones are rare, and come one after the other."""

_LARGEST_WARMED = 512
"""Rows. A larger step takes so long itself that what its first run adds is a small part of it."""


class OpenVinoEngine(Engine):
    """Implements `Engine` on a CPU, for blocks of 32 tokens."""

    def __init__(
        self,
        model_path: Path,
        spec: EngineSpec,
        num_blocks: int,
        *,
        kv_cache_dtype: str,
        precision: str,
        num_threads: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """Compile the network and allocate the pool.

        Args:
            model_path: `model.onnx`, its data file beside it.
            spec: what the network was built for.
            num_blocks: blocks callers may use, at least 1; one more is allocated for padding.
            kv_cache_dtype: what keys and values are kept in: `float32`, `float16` or `uint8` where `precision` is
                `float32`, `bfloat16` or `uint8` where it is `bfloat16`. `uint8` has a scale for each token and head.
            precision: what is computed in: `float32` or `bfloat16`.
            num_threads: CPU threads, `None` for one on each core.
            deterministic: pad small steps so far that a row's logits are bit-equal in every step in which each
                sequence has two rows or more.

        Raises:
            ValueError: an argument is none of these, or contradicts the network.
            OpenVinoError: OpenVINO cannot read or compile the network, or not in this precision on this CPU.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        compiled = compile_network(
            model_path, precision=precision, kv_cache_dtype=kv_cache_dtype, num_threads=num_threads
        )
        self._pool = KvPool(_block_shapes(compiled, spec), num_blocks + 1)
        if self._pool.bytes_per_block != spec.kv_bytes_per_block:
            raise ValueError(
                f"spec.kv_bytes_per_block is {spec.kv_bytes_per_block}, but blocks of this network in {kv_cache_dtype} "
                f"take {self._pool.bytes_per_block}"
            )
        smallest = _SMALLEST_DETERMINISTIC_STEP if deterministic else _SMALLEST_STEP
        self._sizes = padded_sizes(spec.max_num_tokens, smallest)
        self._request = compiled.create_infer_request()
        self._step_tensors: dict[str, openvino.Tensor] = {}
        for name, tensor in self._pool.tensors.items():
            self._request.set_tensor(name, tensor)

    def submit(self, inputs: StepInputs) -> PendingLogits:
        """See `Engine.submit`. OpenVINO's threads compute; the caller's is free."""
        validate_step(inputs, self.spec, self.num_blocks)
        return self._submit(inputs)

    def padded_rows(self, num_rows: int) -> int:
        """See `Engine.padded_rows`."""
        return padded_size(num_rows, self._sizes)

    def warm_up(self) -> None:
        """Run the padded sizes, the largest first so that buffers grow once.

        Sampled rows are warmed up as far as a step without drafts can have them, `max_batch_size`, or one sequence
        with drafts, `_LARGEST_VERIFICATION`. Sizes beyond `_LARGEST_WARMED` are left out.
        """
        for size in reversed(self._sizes):
            if size <= _LARGEST_WARMED:
                self._submit(self._padding_step(size))()

    def copy_blocks(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Engine.copy_blocks`. All sources are read before a target is written."""
        validate_block_ids(sources, self.num_blocks)
        validate_block_ids(targets, self.num_blocks)
        self._pool.copy(sources, targets)

    def read_block(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """See `Engine.read_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        return self._pool.read(block_id, out)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """See `Engine.write_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        self._pool.write(block_id, data)

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """See `Engine.kv_regions`. The last block of each is padding's."""
        return self._pool.regions

    def close(self) -> None:
        """Let go of the network and the pool; the engine cannot run afterwards."""
        del self._request, self._step_tensors, self._pool

    def _submit(self, inputs: StepInputs) -> PendingLogits:
        padded = pad_step(inputs, self._sizes, self.num_blocks, self.spec.tokens_per_block)
        max_context_len = int((padded.past_lens + np.diff(padded.subsequence_begins)).max())
        tensors = {name: openvino.Tensor(array, shared_memory=True) for name, array in padded._asdict().items()}
        tensors["max_context_len"] = openvino.Tensor(np.array(max_context_len, np.int32))
        for name, tensor in tensors.items():
            self._request.set_tensor(name, tensor)
        self._step_tensors = tensors  # the request reads their memory until it is done
        # Not infer(): it copies the logits into arrays of its own.
        self._request.start_async()

        def wait() -> NDArray[np.float32]:
            self._request.wait()
            logits: NDArray[np.float32] = self._request.get_output_tensor().data
            return logits[: len(inputs.sampled_rows)]

        return wait

    def _padding_step(self, num_rows: int) -> StepInputs:
        """A step of padding only, in the scratch block."""
        tokens_per_block = self.spec.tokens_per_block
        num_entries = -(-num_rows // tokens_per_block)
        return StepInputs(
            input_ids=np.zeros(num_rows, np.int64),
            position_ids=np.arange(num_rows),
            past_lens=np.zeros(1, np.int32),
            subsequence_begins=np.array([0, num_rows], np.int32),
            block_indices=np.full(num_entries, self.num_blocks, np.int32),
            block_indices_begins=np.array([0, num_entries], np.int32),
            sampled_rows=np.zeros(min(num_rows, max(self.spec.max_batch_size, _LARGEST_VERIFICATION)), np.int64),
        )


def _block_shapes(
    compiled: openvino.CompiledModel, spec: EngineSpec
) -> dict[str, tuple[tuple[int, ...], openvino.Type]]:
    """Cache name -> shape and type of a block as the plugin wants it, layer by layer, keys before values."""
    ports = {port.get_any_name(): port for port in compiled.inputs}
    names = [f"{kind}_cache_{layer}" for layer in range(spec.num_layers) for kind in ("key", "value")]
    expected = {*StepInputs._fields, "max_context_len", *names}
    if set(ports) != expected:
        raise ValueError(
            f"the network's inputs are not those of {spec.num_layers} layers: missing {sorted(expected - set(ports))}, "
            f"unknown {sorted(set(ports) - expected)}"
        )
    shapes = {name: tuple(dim.get_length() for dim in list(ports[name].partial_shape)[1:]) for name in names}
    for name, shape in shapes.items():
        if shape[:2] != (spec.num_kv_heads, spec.tokens_per_block):
            raise ValueError(
                f"{name} has blocks of {shape[1]} tokens and {shape[0]} heads; "
                f"the spec says {spec.tokens_per_block} and {spec.num_kv_heads}"
            )
    return {name: (shape, ports[name].element_type) for name, shape in shapes.items()}


__all__ = ["OpenVinoEngine", "OpenVinoError"]
