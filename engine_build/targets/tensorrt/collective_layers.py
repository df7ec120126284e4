"""What devices exchange, as TensorRT's own collective layers; a runtime gives them their NCCL communicator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from engine_build.network.collectives import ALL_GATHER, ALL_REDUCE
from engine_build.network.paged_attention import DOMAIN
from engine_build.targets.tensorrt.emitter import NetworkEmitter, Operator, Tensor, attribute


def _collective(operation: str, reduction: str) -> Operator:
    def emit(emitter: NetworkEmitter, node: onnx.NodeProto) -> Sequence[Tensor]:
        trt, ranks = emitter.trt, list(attribute(node, "ranks"))
        layer = emitter.network.add_dist_collective(
            emitter.tensor(node.input[0]),
            getattr(trt.CollectiveOperation, operation),
            getattr(trt.ReduceOperation, reduction),
            -1,  # no rank is the root
            np.array(ranks, np.int64),
        )
        emitter.named(layer, node.name)
        layer.num_ranks = len(ranks)  # 1 by default, whatever the group, and a gathered tensor's size follows from it
        return [layer.get_output(0)]

    return emit


COLLECTIVE_OPERATORS: dict[tuple[str, str], Operator] = {
    (DOMAIN, ALL_REDUCE): _collective("ALL_REDUCE", "SUM"),
    (DOMAIN, ALL_GATHER): _collective("ALL_GATHER", "NONE"),
}
"""(domain, operator type) -> what adds its layer."""
