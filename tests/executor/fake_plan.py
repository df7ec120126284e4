"""A plan whose network is computed by the reference graph, in the memory of a fake device, when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from executor.engines.cuda.device import Address, Stream
from executor.engines.interface import EngineSpec
from executor.engines.reference_graph import ReferenceGraph
from executor.engines.tensorrt_plan import PlanError
from tests.executor.fake_cuda import FakeDevice, Span

_ACTIVATION_BYTES = 1024


class FakePlan:
    """Implements `Plan` for a tiny float32 network, with a profile for generation steps and one for all."""

    activation_bytes = _ACTIVATION_BYTES

    def __init__(
        self,
        device: FakeDevice,
        model_path: Path,
        spec: EngineSpec,
        *,
        cache_dtype: torch.dtype = torch.float32,
        can_be_captured: bool = True,
    ) -> None:
        self.device, self.spec = device, spec
        self.graph = ReferenceGraph(model_path, torch.device("cpu"))
        self.can_be_captured = can_be_captured
        self.inputs = tuple(self.graph.inputs)
        self.caches = tuple(name for name in self.inputs if "_cache_" in name)
        self.dtypes = self.graph.inputs | dict.fromkeys(self.caches, cache_dtype)
        self.outputs: tuple[str, ...] = ("logits", *(f"{name}_out" for name in self.caches))
        self.profile_rows = (spec.max_batch_size, spec.max_num_tokens)
        self.is_closed = False
        self.fails = False
        """Whether TensorRT refuses to run from now on."""

    def create_context(self, profile: int, activations: Address, stream: Stream) -> FakeContext:  # noqa: ARG002
        return FakeContext(self, profile, activations)

    def close(self) -> None:
        self.is_closed = True


class FakeContext:
    """Implements `Context`."""

    def __init__(self, plan: FakePlan, profile: int, activations: Address) -> None:
        self._plan, self._profile, self._activations = plan, profile, activations
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, Address] = {}

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        if name == "input_ids" and shape[0] > self._plan.profile_rows[self._profile]:
            raise PlanError(f"profile {self._profile} does not take {shape[0]} rows")
        self._shapes[name] = tuple(shape)

    def set_address(self, name: str, address: Address) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: Stream) -> None:
        plan = self._plan
        if plan.is_closed or plan.fails:
            raise PlanError("the plan could not be run: it was told not to")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        assert all(addresses[name] == addresses[f"{name}_out"] for name in plan.caches)
        spans = {
            name: Span(addresses[name], math.prod(shapes[name]) * plan.dtypes[name].itemsize) for name in plan.inputs
        }
        num_sampled = shapes["sampled_rows"][0]
        logits = Span(addresses["logits"], num_sampled * plan.spec.vocab_size * np.dtype(np.float32).itemsize)

        def run() -> None:
            tensors = {
                name: torch.from_numpy(plan.device.view(*span)).view(plan.dtypes[name]).reshape(shapes[name])
                for name, span in spans.items()
            }
            with torch.inference_mode():
                (computed,) = plan.graph.run(tensors)
            plan.device.view(*logits)[:] = computed.contiguous().numpy().reshape(-1).view(np.uint8)

        caches = [spans[name] for name in plan.caches]
        reads = [span for name, span in spans.items() if name not in plan.caches]
        writes = [logits, *caches, Span(self._activations, _ACTIVATION_BYTES)]
        plan.device.queue("network", stream, run, reads, writes)
