"""The engine for plans of TensorRT: queues steps on a stream and collects their logits when they are there.

```
host       pack k │ pack k+1 │ collect k │ pack k+2 │ ...          two steps' buffers, in turns
stream            │ inputs k ► network k │ inputs k+1 ► network k+1 │ ...
copies                                   │ logits k ►               │ logits k+1 ►
```

Generation steps are padded to few sizes, whose networks are recorded in CUDA graphs by `warm_up`: a step is then one
call. All other steps are queued layer by layer with the shapes they have.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_build.kernels.shape import EIGHT_BIT_MAXIMA
from executor.api.errors import UnsupportedFeatureError
from executor.engines.cuda.device import Address, Device, Event, Graph, HostBuffer
from executor.engines.cuda.kv_pool import KvPool
from executor.engines.cuda.step_buffers import (
    PackedStep,
    blocks_per_sequence,
    input_arrays,
    is_generation,
    largest_step_bytes,
    pack,
    pad_generation,
    spread,
)
from executor.engines.interface import Engine, EngineSpec, PendingLogits, StepInputs
from executor.engines.openvino_padding import padded_sizes
from executor.engines.tensorrt_plan import Context, Plan, PlanError
from executor.engines.validate import validate_block_ids, validate_step

_LOGITS = "logits"
_NUM_SLOTS = 2
"""Steps that may be queued at once: while one runs, the next is packed."""


class _PendingStep(NamedTuple):
    """A step that was queued."""

    slot: int
    num_sampled: int


@dataclass(slots=True)
class _Slot:
    """Buffers of one step in flight."""

    inputs: HostBuffer
    logits: Address
    logits_on_host: HostBuffer
    computed: Event
    copied: Event
    graphs: dict[int, tuple[Context, Graph]] = field(default_factory=dict)
    """Padded rows -> the network recorded for them; its context is kept as long as the graph."""


class TensorRtEngine(Engine):
    """Implements `Engine` on a GPU. Owns the plan it is given; the device is the caller's."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        spec: EngineSpec,
        num_blocks: int,
        *,
        kv_cache_dtype: str,
        max_num_blocks: int | None = None,
        cuda_graphs: bool = True,
        num_graph_sizes: int = 0,
    ) -> None:
        """Allocate everything a step needs.

        Args:
            plan: a loaded plan.
            device: the GPU it was loaded on.
            spec: what the plan was built for.
            num_blocks: KV blocks that callers may use, at least 1; one more is allocated for padding.
            kv_cache_dtype: what the plan keeps keys and values in: 8 bits have a scale behind them, as
                `engine_build.kernels.shape` says.
            max_num_blocks: as many as `grow` may ever be asked for; `None` for `num_blocks`.
            cuda_graphs: record generation steps, where the plan's can be recorded.
            num_graph_sizes: how many of the padded sizes are recorded; 0 for all.

        Raises:
            ValueError: `num_blocks` or `spec` is wrong.
            PlanError: the plan takes other inputs than a network of `spec`.
            OutOfDeviceMemoryError: the pool does not fit.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self._plan, self._device = plan, device
        self._records_graphs = cuda_graphs and plan.can_be_captured
        device.make_current()
        caches = [f"{kind}_cache_{layer}" for layer in range(spec.num_layers) for kind in ("key", "value")]
        _check_tensors(plan, caches)
        if spec.kv_bytes_per_block % len(caches):
            raise ValueError(f"spec.kv_bytes_per_block {spec.kv_bytes_per_block} is no multiple of {len(caches)} pools")
        self._stream, self._copies = device.create_stream(), device.create_stream()
        block_bytes = dict.fromkeys(caches, spec.kv_bytes_per_block // len(caches))
        self._block_shape: tuple[int, ...] = (spec.num_kv_heads, spec.tokens_per_block, spec.head_size)
        if kv_cache_dtype in EIGHT_BIT_MAXIMA:
            self._block_shape = (spec.num_kv_heads, spec.kv_bytes_per_block // len(caches) // spec.num_kv_heads)
        self._pool = KvPool(device, self._stream, block_bytes, max(num_blocks, max_num_blocks or 0) + 1)
        self._pool.grow(num_blocks + 1)
        self._activations = device.allocate(max(1, plan.activation_bytes))
        step_bytes = largest_step_bytes(spec)
        self._inputs = device.allocate(step_bytes)
        logits_bytes = spec.max_num_tokens * spec.vocab_size * np.dtype(np.float32).itemsize
        self._slots = [
            _Slot(
                device.allocate_host(step_bytes),
                device.allocate(logits_bytes),
                device.allocate_host(logits_bytes),
                device.create_event(),
                device.create_event(),
            )
            for _ in range(_NUM_SLOTS)
        ]
        self._next_slot = 0
        self._contexts = [self._context(profile) for profile in range(len(plan.profile_rows))]
        self._generation_sizes = spread(padded_sizes(spec.max_batch_size, 1), num_graph_sizes)
        self._entries = blocks_per_sequence(spec)

    def submit(self, inputs: StepInputs) -> PendingLogits:
        """See `Engine.submit`: the step is queued. A second may be while the first is pending; a third takes the
        first one's buffers.

        Raises:
            InvalidStepError: nothing was queued.
            PlanError, CudaError: the step could not be queued.
        """
        validate_step(inputs, self.spec, self.num_blocks)
        self._device.make_current()
        return partial(self._collect, self._submit(inputs))

    def _collect(self, pending: _PendingStep) -> NDArray[np.float32]:
        slot = self._slots[pending.slot]
        self._device.synchronize(slot.copied)
        count = pending.num_sampled * self.spec.vocab_size
        logits: NDArray[np.float32] = slot.logits_on_host.array.view(np.float32)[:count]
        return logits.reshape(pending.num_sampled, self.spec.vocab_size)

    def padded_rows(self, num_rows: int) -> int:
        """See `Engine.padded_rows`: as if the step were a generation step, where it could be one."""
        if not self._records_graphs or num_rows > self.spec.max_batch_size:
            return num_rows
        return self._generation_sizes[bisect_left(self._generation_sizes, num_rows)]

    def warm_up(self) -> None:
        """Run the largest step of each profile, then every size of a generation step, and record those in graphs."""
        self._device.make_current()
        most = min(self.spec.max_num_tokens, self.spec.max_batch_size * self._entries * self.spec.tokens_per_block)
        for rows in sorted(set(self._plan.profile_rows), reverse=True):
            self._collect(self._submit(self._padding_step(min(rows, most))))
        if not self._records_graphs:
            return
        for size in reversed(self._generation_sizes):
            step = pad_generation(self._padding_step(1), size, self.num_blocks, self._entries)
            for slot in self._slots:
                if size not in slot.graphs:
                    slot.graphs[size] = self._record(step, slot)

    def grow(self, num_blocks: int) -> None:
        """Have more KV blocks; those there are keep their content. Graphs are recorded anew by `warm_up`.

        Raises:
            ValueError: fewer than now, or more than `max_num_blocks`.
            OutOfDeviceMemoryError: nothing has changed.
        """
        if num_blocks < self.num_blocks:
            raise ValueError(f"a pool of {self.num_blocks} blocks cannot shrink to {num_blocks}")
        self._device.make_current()
        self._device.synchronize_stream(self._stream)
        self._pool.grow(num_blocks + 1)
        self.num_blocks = num_blocks
        self._drop_graphs()

    def copy_blocks(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Engine.copy_blocks`. All sources are read before a target is written."""
        validate_block_ids(sources, self.num_blocks)
        validate_block_ids(targets, self.num_blocks)
        self._device.make_current()
        self._pool.copy(sources, targets)

    def read_block(self, block_id: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """See `Engine.read_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        self._device.make_current()
        return self._pool.read(block_id, out)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """See `Engine.write_block`."""
        validate_block_ids(np.array([block_id]), self.num_blocks)
        self._device.make_current()
        self._pool.write(block_id, data)

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """See `Engine.kv_regions`."""
        raise UnsupportedFeatureError(
            "transfers from a pool in GPU memory are not supported; only pools in main memory are"
        )

    def close(self) -> None:
        """Wait for what is queued and give everything back; the engine cannot run afterwards."""
        device = self._device
        device.make_current()
        device.synchronize_stream(self._stream)
        device.synchronize_stream(self._copies)
        self._drop_graphs()
        self._contexts.clear()
        self._plan.close()
        self._pool.close()
        for slot in self._slots:
            device.free_host(slot.inputs)
            device.free(slot.logits)
            device.free_host(slot.logits_on_host)
            device.destroy_event(slot.computed)
            device.destroy_event(slot.copied)
        self._slots.clear()
        device.free(self._inputs)
        device.free(self._activations)
        device.destroy_stream(self._stream)
        device.destroy_stream(self._copies)

    # -- one step ---------------------------------------------------------------------------------------------------

    def _submit(self, inputs: StepInputs) -> _PendingStep:
        index = self._next_slot
        self._next_slot = (index + 1) % _NUM_SLOTS
        slot, num_sampled = self._slots[index], len(inputs.sampled_rows)
        self._device.synchronize(slot.copied)
        padded = self._graph_size(inputs, slot)
        if padded is None:
            packed = self._send(inputs, slot)
            context = self._contexts[self._profile(len(inputs.input_ids))]
            self._bind(context, packed, slot)
            context.enqueue(self._stream)
        else:
            self._send(pad_generation(inputs, padded, self.num_blocks, self._entries), slot)
            self._device.launch(slot.graphs[padded][1], self._stream)
        self._device.record(slot.computed, self._stream)
        self._device.wait(self._copies, slot.computed)
        num_bytes = num_sampled * self.spec.vocab_size * np.dtype(np.float32).itemsize
        if num_bytes:
            self._device.copy_to_host(slot.logits_on_host, 0, slot.logits, num_bytes, self._copies)
        self._device.record(slot.copied, self._copies)
        return _PendingStep(index, num_sampled)

    def _graph_size(self, inputs: StepInputs, slot: _Slot) -> int | None:
        """The size whose graph computes the step; `None` if none was recorded for it."""
        if not is_generation(inputs):
            return None
        size = self._generation_sizes[bisect_left(self._generation_sizes, len(inputs.input_ids))]
        padding = size - len(inputs.input_ids)
        fits = len(inputs.block_indices) + padding <= size * self._entries
        return size if fits and size in slot.graphs else None

    def _profile(self, num_rows: int) -> int:
        """The narrowest profile that takes so many rows."""
        fitting = [(rows, index) for index, rows in enumerate(self._plan.profile_rows) if rows >= num_rows]
        if not fitting:
            raise PlanError(f"no profile of the plan takes {num_rows} rows; the widest {max(self._plan.profile_rows)}")
        return min(fitting)[1]

    def _send(self, inputs: StepInputs, slot: _Slot) -> PackedStep:
        """Pack the inputs and queue their copy to the device."""
        packed = pack(input_arrays(inputs), slot.inputs.array)
        self._device.copy_to_device(self._inputs, slot.inputs, packed.num_bytes, self._stream)
        return packed

    def _bind(self, context: Context, packed: PackedStep, slot: _Slot) -> None:
        for name, place in packed.fields.items():
            if name in self._plan.inputs:
                context.set_shape(name, place.shape)
                context.set_address(name, Address(self._inputs + place.offset))
        shape = (self._pool.num_blocks, *self._block_shape)
        for name, address in self._pool.addresses.items():
            context.set_shape(name, shape)
            context.set_address(name, address)
            # The pool after the step is the pool before it: written in place.
            context.set_address(f"{name}_out", address)
        context.set_address(_LOGITS, slot.logits)

    def _record(self, inputs: StepInputs, slot: _Slot) -> tuple[Context, Graph]:
        """Run a padded generation step once, as TensorRT asks, and record it."""
        self._device.synchronize(slot.copied)
        context = self._context(self._profile(len(inputs.input_ids)))
        self._bind(context, self._send(inputs, slot), slot)
        context.enqueue(self._stream)
        self._device.synchronize_stream(self._stream)
        self._device.begin_capture(self._stream)
        context.enqueue(self._stream)
        return context, self._device.end_capture(self._stream)

    def _context(self, profile: int) -> Context:
        return self._plan.create_context(profile, self._activations, self._stream)

    def _drop_graphs(self) -> None:
        for slot in self._slots:
            for _, graph in slot.graphs.values():
                self._device.destroy_graph(graph)
            slot.graphs.clear()

    def _padding_step(self, num_rows: int) -> StepInputs:
        """One sequence of padding, all of whose blocks are the scratch block."""
        entries = -(-num_rows // self.spec.tokens_per_block)
        return StepInputs(
            input_ids=np.zeros(num_rows, np.int64),
            position_ids=np.arange(num_rows),
            past_lens=np.zeros(1, np.int32),
            subsequence_begins=np.array([0, num_rows], np.int32),
            block_indices=np.full(entries, self.num_blocks, np.int32),
            block_indices_begins=np.array([0, entries], np.int32),
            sampled_rows=np.zeros(min(num_rows, self.spec.max_batch_size), np.int64),
        )


def buffer_bytes(spec: EngineSpec) -> int:
    """Memory of the device that steps go in and out through."""
    logits = spec.max_num_tokens * spec.vocab_size * np.dtype(np.float32).itemsize
    return largest_step_bytes(spec) + _NUM_SLOTS * logits


def _check_tensors(plan: Plan, caches: list[str]) -> None:
    taken = {*StepInputs._fields, *caches}
    missing = sorted(taken - set(plan.inputs))
    unknown = sorted(set(plan.inputs) - taken - {"max_context_len"})
    if missing or unknown:
        raise PlanError(f"the plan's inputs are not those of {len(caches) // 2} layers: {missing=}, {unknown=}")
    expected = {_LOGITS, *(f"{name}_out" for name in caches)}
    if set(plan.outputs) != expected:
        raise PlanError(f"the plan's outputs are {sorted(plan.outputs)}; expected {sorted(expected)}")
