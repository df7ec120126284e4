"""Random steps of `PagedAttention`, computed by its definition and by the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine_build.kernels.shape import AttentionShape
from executor.engines.reference_attention import paged_attention
from executor.engines.reference_attention_triton import TritonAttention
from executor.engines.reference_kv_cache import KV_CACHE_DTYPES, block_shape

_SPARE_BLOCKS = 3
"""That no table names: they must stay as they are."""


@dataclass(frozen=True)
class Case:
    """One layer and one step."""

    sequences: tuple[tuple[int, int], ...]
    """Positions already in the pool, and rows of this step, for each."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    tokens_per_block: int = 16
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    sliding_window: int = 0
    soft_cap: float = 0.0
    num_multiprocessors: int = 1
    """More of them, more splits."""
    deterministic: bool = False
    seed: int = 0

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.tokens_per_block,
            self.dtype,
            self.kv_cache_dtype,
            self.head_size**-0.5,
            self.sliding_window,
            self.soft_cap,
        )


class Outcome(NamedTuple):
    """How far the kernels are from the definition."""

    output: Tensor
    """[T, num_heads * head_size] float32, by the kernels."""
    expected: Tensor
    same_pool_bytes: bool
    """Both pools, all blocks, byte for byte."""


def run_case(case: Case, device: str = "cpu") -> Outcome:
    """Compute the case both ways, from pools that hold random bits of finite value everywhere."""
    arguments = random_arguments(case, device)
    pools = [arguments.pop(name) for name in ("key_cache", "value_cache")]
    definition, kernels = ([pool.clone() for pool in pools] for _ in range(2))
    expected = call(paged_attention, case, arguments, definition)
    attention = TritonAttention(num_multiprocessors=case.num_multiprocessors, deterministic=case.deterministic)
    output = call(attention, case, arguments, kernels)
    same = all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(definition, kernels, strict=True)
    )
    return Outcome(output.float().cpu(), expected.float().cpu(), same)


def run_apart(case: Case, cuts: Sequence[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """All sequences in one step; and one by one, each in a step for every piece of it.

    Args:
        case: the step.
        cuts: rows of a sequence before which it is cut; those behind its end are left out.
        device: where the kernels run.

    Returns:
        Both outputs, `[T, num_heads * head_size]`.
    """
    arguments = random_arguments(case, device)
    pools = [arguments.pop(name) for name in ("key_cache", "value_cache")]
    attention = TritonAttention(num_multiprocessors=case.num_multiprocessors, deterministic=case.deterministic)
    together = call(attention, case, arguments, [pool.clone() for pool in pools])
    row_begins, table_begins = (arguments[name].tolist() for name in ("subsequence_begins", "block_indices_begins"))
    apart = []
    for index, (past, num_rows) in enumerate(case.sequences):
        table = arguments["block_indices"][table_begins[index] : table_begins[index + 1]]
        bounds = [0, *(cut for cut in cuts if cut < num_rows), num_rows]
        for begin, end in pairwise(bounds):
            rows = slice(row_begins[index] + begin, row_begins[index] + end)
            step = {name: arguments[name][rows] for name in ("query", "key", "value")} | {
                "past_lens": torch.tensor([past + begin], dtype=torch.int32, device=device),
                "subsequence_begins": torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                "block_indices": table,
                "block_indices_begins": torch.tensor([0, len(table)], dtype=torch.int32, device=device),
                "max_context_len": torch.tensor(past + end),
            }
            apart.append(call(attention, case, step, pools))
    return together, torch.cat(apart)


def random_arguments(case: Case, device: str) -> dict[str, Tensor]:
    """The operator's inputs by name; block tables are shuffled over the pool."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, pool_dtype = KV_CACHE_DTYPES[case.dtype], KV_CACHE_DTYPES[case.kv_cache_dtype]
    past_lens, row_counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*case.sequences, strict=True))
    context_lens = past_lens + row_counts
    table_lens = -(-context_lens // case.tokens_per_block)
    num_rows, num_blocks = int(row_counts.sum()), int(table_lens.sum()) + _SPARE_BLOCKS

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def pool() -> Tensor:
        shape = (num_blocks, *block_shape(case.num_kv_heads, case.tokens_per_block, case.head_size, pool_dtype))
        if not case.shape.is_eight_bit:
            return torch.randn(shape, generator=generator).to(pool_dtype).to(device)
        values, scales = shape[-1] * case.head_size // (case.head_size + 4), case.tokens_per_block
        elements = torch.randn((*shape[:-1], values), generator=generator).mul(30).clamp(-120, 120).to(pool_dtype)
        factors = torch.rand((*shape[:-1], scales), generator=generator) * 0.05
        raw = torch.cat([elements.view(torch.uint8), factors.view(torch.uint8)], dim=-1)
        return raw.view(pool_dtype).to(device)

    def begins(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32).to(device)

    return {
        "query": normal(num_rows, case.num_heads * case.head_size),
        "key": normal(num_rows, case.num_kv_heads * case.head_size),
        "value": normal(num_rows, case.num_kv_heads * case.head_size),
        "key_cache": pool(),
        "value_cache": pool(),
        "past_lens": past_lens.to(device),
        "subsequence_begins": begins(row_counts),
        "block_indices": torch.randperm(num_blocks, generator=generator)[: int(table_lens.sum())].int().to(device),
        "block_indices_begins": begins(table_lens),
        "max_context_len": context_lens.max(),
    }


def call(operator: Callable[..., Tensor], case: Case, arguments: dict[str, Tensor], pools: list[Tensor]) -> Tensor:
    """Run the operator, or what computes it, on the case's inputs; both pools are written in place."""
    key_cache, value_cache = pools
    return operator(
        **arguments,
        key_cache=key_cache,
        value_cache=value_cache,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        scale=case.shape.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )
