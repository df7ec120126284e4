"""What the reference engine computes with on an NVIDIA GPU: torch's own products, and our attention kernels.

The graph and its other operators are those of the CPU; only what would be slow there differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from executor.api.errors import UnsupportedFeatureError
from executor.engines.reference_operators import OPERATORS, Operator


def cuda_operators(device: torch.device, *, deterministic: bool) -> Mapping[tuple[str, str], Operator]:
    """The operators by domain and type, for one GPU.

    Args:
        device: a GPU that torch can use.
        deterministic: keep products in tiles of one shape, and attention in one order of summation, so that a row's
            bits do not depend on what else is in the step.

    Raises:
        UnsupportedFeatureError: Triton is not installed.
    """
    try:
        from executor.engines.reference_attention_triton import TritonAttention
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnsupportedFeatureError(
            "target reference on a GPU needs the package triton: pip install 'inflight-executor[kernels]'"
        ) from error
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    attention = TritonAttention(num_multiprocessors=multiprocessors, deterministic=deterministic)
    replaced: dict[tuple[str, str], Operator] = {("inflight", "PagedAttention"): attention}
    if not deterministic:
        replaced["", "MatMul"] = torch.matmul
    return {**OPERATORS, **replaced}
