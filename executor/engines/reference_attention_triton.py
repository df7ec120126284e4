"""`PagedAttention` by our Triton kernels: what the reference engine computes it with on a GPU.

The same operator as `reference_attention.paged_attention`, which is its definition. Nothing is read back from the
device: launches depend on shapes and on `max_context_len`, which lies in main memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_build.kernels import paged_attention as kernels
from engine_build.kernels.plan import StepShape, plan_step, workspace_shapes
from engine_build.kernels.shape import AttentionShape

_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int8: "int8",
}


class TritonAttention:
    """The operator as a callable, for one device."""

    def __init__(self, *, num_multiprocessors: int, deterministic: bool = False) -> None:
        """
        Args:
            num_multiprocessors: of the device.
            deterministic: a row's bits do not depend on what else is in the step, at some cost in speed.
        """
        self._num_multiprocessors = num_multiprocessors
        self._deterministic = deterministic

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        past_lens: Tensor,
        subsequence_begins: Tensor,
        block_indices: Tensor,
        block_indices_begins: Tensor,
        max_context_len: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """See `reference_attention.paged_attention`.

        Args:
            key_cache: `[num_blocks, num_kv_heads, tokens_per_block, head_size]` of a float type, or of 8 bits
                `[num_blocks, num_kv_heads, chunk]` as `engine_build.kernels.shape` draws it.
            max_context_len: in main memory.

        Raises:
            KernelError: no kernel computes this shape.
        """
        is_eight_bit = key_cache.dim() == 3
        bytes_per_token = head_size + 4
        shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            tokens_per_block=key_cache.shape[2] // bytes_per_token if is_eight_bit else key_cache.shape[2],
            dtype=_NAMES[query.dtype],
            kv_cache_dtype=_NAMES[key_cache.dtype],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        shape.check()
        step = StepShape(len(query), len(past_lens), int(max_context_len))
        launches = plan_step(
            shape, step, num_multiprocessors=self._num_multiprocessors, deterministic=self._deterministic
        )
        tensors: dict[str, Tensor | int] = {
            "query": query.contiguous(),
            "key": key.contiguous(),
            "value": value.contiguous(),
            "key_pool": key_cache,
            "value_pool": value_cache,
            "past_lens": past_lens,
            "subsequence_begins": subsequence_begins,
            "block_indices": block_indices,
            "block_indices_begins": block_indices_begins,
            "num_sequences": step.num_sequences,
            "output": torch.empty_like(query, memory_format=torch.contiguous_format),
        }
        # Where nothing is split these two are not touched, but a kernel's parameters must be something.
        tensors |= {"split_weighted": query, "split_sums": query}
        for launch in launches:
            tensors |= {
                name: torch.empty(size, dtype=torch.float32, device=query.device)
                for name, size in workspace_shapes(launch).items()
            }
            kernel = getattr(kernels, launch.kernel)
            arguments = {name: tensors[name] for name in kernel.arg_names if name in tensors}
            with torch.cuda.device_of(query):  # Triton launches on the current GPU, whichever the tensors are on
                kernel[launch.grid](
                    **arguments, **launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages
                )
        output = tensors["output"]
        assert isinstance(output, Tensor)
        return output
