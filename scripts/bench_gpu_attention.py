"""How fast the attention kernels are on this GPU, as shares of what the GPU and torch reach in the same run.

Generation reads every key and value once, so its measure is bandwidth: bytes of the pool over time, against a copy on
the device. Prompts are compute: time against torch's flash attention on keys and values that lie in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench_cudagraph

from executor.engines.reference_attention_triton import TritonAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK = 32, 8, 128, 16
"""Of Llama 3 8B."""
LEAST_BANDWIDTH_SHARE = 0.85
LEAST_FLASH_SHARE = 0.60


class Measured(NamedTuple):
    """One figure, and what it is a share of."""

    what: str
    value: float
    reference: float
    unit: str
    least_share: float

    @property
    def share(self) -> float:
        return self.value / self.reference


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def generation(batch_size: int = 64, context_len: int = 4096) -> Measured:
    """One row of each sequence, over block tables shuffled through the pool."""
    attention, arguments = _step([(context_len - 1, 1)] * batch_size)
    seconds = _seconds(lambda: attention(**arguments))
    num_bytes = 2 * batch_size * context_len * NUM_KV_HEADS * HEAD_SIZE * torch.bfloat16.itemsize
    what = f"generation, batch {batch_size}, context {context_len}: bytes read, of a copy's bandwidth"
    return Measured(what, num_bytes / seconds / 1e12, copy_bandwidth() / 1e12, "TB/s", LEAST_BANDWIDTH_SHARE)


def prompt(num_sequences: int = 4, length: int = 4096) -> Measured:
    """Whole prompts, against torch's flash kernel."""
    attention, arguments = _step([(0, length)] * num_sequences)
    seconds = _seconds(lambda: attention(**arguments))
    query, key, value = (
        torch.randn(num_sequences, NUM_HEADS, length, HEAD_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = _seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    operations = 2 * num_sequences * NUM_HEADS * length * length * HEAD_SIZE  # two products, half of them masked
    what = f"prompts, {num_sequences} of {length} rows: operations, of torch's flash attention"
    return Measured(what, operations / seconds / 1e12, operations / flash / 1e12, "TFLOP/s", LEAST_FLASH_SHARE)


def _step(sequences: list[tuple[int, int]]) -> tuple[TritonAttention, dict[str, Tensor | int | float]]:
    """The operator and its arguments for (positions in the pool, rows) of each sequence."""
    device = torch.device("cuda")
    past_lens, row_counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*sequences, strict=True))
    table_lens = -(-(past_lens + row_counts) // TOKENS_PER_BLOCK)
    num_rows, num_blocks = int(row_counts.sum()), int(table_lens.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    def begins(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)

    pool_shape = (num_blocks, NUM_KV_HEADS, TOKENS_PER_BLOCK, HEAD_SIZE)
    arguments: dict[str, Tensor | int | float] = {
        "query": normal(num_rows, NUM_HEADS * HEAD_SIZE),
        "key": normal(num_rows, NUM_KV_HEADS * HEAD_SIZE),
        "value": normal(num_rows, NUM_KV_HEADS * HEAD_SIZE),
        "key_cache": normal(*pool_shape),
        "value_cache": normal(*pool_shape),
        "past_lens": past_lens.to(device),
        "subsequence_begins": begins(row_counts),
        "block_indices": torch.randperm(num_blocks).int().to(device),
        "block_indices_begins": begins(table_lens),
        "max_context_len": (past_lens + row_counts).max(),
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_size": HEAD_SIZE,
        "scale": HEAD_SIZE**-0.5,
        "sliding_window": 0,
    }
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonAttention(num_multiprocessors=processors), arguments


def _seconds(work: Callable[[], object]) -> float:
    """Median time of the work, launched from a graph so that the host's time does not count."""
    work()  # compiles
    milliseconds: float = do_bench_cudagraph(work, return_mode="median")
    return milliseconds / 1e3
