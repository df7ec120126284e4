"""How many KV blocks the pool gets, with the arithmetic that says why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from executor.api.config import KvCacheConfig
from executor.api.errors import InvalidRequestError
from executor.engines.interface import EngineSpec

_DEFAULT_FRACTION_ON_CPU = 0.3
"""Main memory is shared with everything else on the machine, unlike a GPU's."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    reason: str
    """For people: the numbers that led to `num_blocks`."""


def pool_size(config: KvCacheConfig, spec: EngineSpec, max_batch_size: int, available_bytes: int) -> PoolSize:
    """Blocks for an engine: the smallest of what was asked for, what memory allows and what can ever be used.

    Args:
        config: `max_tokens` and `free_gpu_memory_fraction` bound the pool.
        spec: gives block size and bytes.
        max_batch_size: sequences that can hold blocks at once.
        available_bytes: memory that is free now.

    Raises:
        InvalidRequestError: not even one sequence of one block fits.
    """
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        fraction = _DEFAULT_FRACTION_ON_CPU
    if not 0 < fraction <= 1:
        raise InvalidRequestError(
            f"kv_cache_config.free_gpu_memory_fraction is {fraction}; it must be in (0, 1]",
            field="kv_cache_config.free_gpu_memory_fraction",
        )
    in_memory = int(available_bytes * fraction) // spec.kv_bytes_per_block
    usable = max_batch_size * -(-spec.max_seq_len // spec.tokens_per_block)
    bounds = {
        f"{fraction:.0%} of {available_bytes / 2**30:.1f} GiB free memory": in_memory,
        f"{max_batch_size} sequences of {spec.max_seq_len} tokens": usable,
    }
    if config.max_tokens is not None:
        bounds[f"max_tokens {config.max_tokens}"] = -(-config.max_tokens // spec.tokens_per_block)
    name, num_blocks = min(bounds.items(), key=lambda bound: bound[1])
    if num_blocks < 1:
        raise InvalidRequestError(
            f"the KV pool has no block: {name} gives {num_blocks} blocks of {spec.kv_bytes_per_block} bytes",
            field="kv_cache_config",
        )
    size = num_blocks * spec.kv_bytes_per_block / 2**20
    tokens = num_blocks * spec.tokens_per_block
    return PoolSize(
        num_blocks,
        f"{num_blocks} KV blocks of {spec.tokens_per_block} tokens ({tokens} tokens, {size:.0f} MiB): {name}",
    )


def available_memory() -> int:
    """Bytes of main memory that can be taken without swapping (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
