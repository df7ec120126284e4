"""Runs a network as a target with native attention would: lowered to standard operators, pools handed on by outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from engine_build.network import MODEL_FILE
from engine_build.network.paged_attention import OPERATOR
from engine_build.targets.tensorrt.native_attention import lower_paged_attention
from engine_build.targets.tensorrt.pool_tensors import cache_output

Feeds = dict[str, NDArray[np.generic]]


def with_soft_cap(model: onnx.ModelProto, soft_cap: float) -> onnx.ModelProto:
    """Bound the scores of every attention; no model that is read asks for it."""
    for node in model.graph.node:
        if node.op_type == OPERATOR:
            node.attribute.append(onnx.helper.make_attribute("soft_cap", soft_cap))
    return model


class LoweredNetwork:
    """One network in onnx's own evaluator."""

    def __init__(self, directory: Path, tokens_per_block: int) -> None:
        self.model = lower_paged_attention(onnx.load(directory / MODEL_FILE), tokens_per_block)
        onnx.checker.check_model(self.model, full_check=True)
        self._evaluator = ReferenceEvaluator(self.model)

    def run(self, inputs: Feeds, caches: Feeds) -> NDArray[np.float32]:
        """One step. `caches` hold the pools before it, and those after it on return."""
        names = [value.name for value in self.model.graph.input]
        feeds = {name: (inputs | caches)[name] for name in names}
        outputs = dict(
            zip((value.name for value in self.model.graph.output), self._evaluator.run(None, feeds), strict=True)
        )
        for name in caches:
            caches[name] = outputs[cache_output(name)]
        logits: NDArray[np.float32] = outputs["logits"]
        return logits
