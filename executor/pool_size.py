"""How many KV blocks the pool and the tiers below it get, with the arithmetic that says why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from executor.api.config import KvCacheConfig
from executor.api.errors import InvalidRequestError
from executor.engines.interface import EngineSpec
from executor.kv_tiers.disk_pool import slot_bytes

_MAIN_MEMORY_FRACTION = 0.3
"""Main memory is shared with everything else on the machine."""
_GPU_FRACTION = 0.9
"""What is left of a GPU beside the engine; a tenth is for what its libraries allocate themselves."""


class PoolMemory(NamedTuple):
    """Memory that a pool can take from."""

    num_bytes: int
    default_fraction: float
    """How much of it is taken where nothing is said."""
    source: str
    """For people: where the bytes come from."""
    on_gpu: bool


def main_memory() -> PoolMemory:
    """What is free of main memory now."""
    free = available_memory()
    return PoolMemory(free, _MAIN_MEMORY_FRACTION, f"{_size(free)} free memory", on_gpu=False)


def gpu_memory(free: int, engine: int) -> PoolMemory:
    """What is left of a GPU's memory.

    Args:
        free: bytes that are free now.
        engine: bytes that the engine will take of them for weights and steps.
    """
    left = max(0, free - engine)
    return PoolMemory(
        left,
        _GPU_FRACTION,
        f"{_size(left)} ({_size(free)} free on the GPU, {_size(engine)} of it for the engine)",
        on_gpu=True,
    )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks in each tier."""

    num_blocks: int
    """In the engine's pool."""
    host_blocks: int
    disk_blocks: int
    reason: str
    """For people: the numbers that led to these, a line for each tier."""


def pool_size(config: KvCacheConfig, spec: EngineSpec, max_batch_size: int, memory: PoolMemory) -> PoolSize:
    """Blocks for an engine: the smallest of what was asked for, what memory allows and what can ever be used; below
    it what was asked for.

    Args:
        config: `max_tokens` and `free_gpu_memory_fraction` bound the pool; `host_cache_size` and `disk_cache_size` say
            how large the tiers below it are.
        spec: gives block size and bytes.
        max_batch_size: sequences that can hold blocks at once.
        memory: where the pool and the host tier will be.

    Raises:
        InvalidRequestError: not even one sequence of one block fits; or a lower tier is too small for one block, or
            larger than the memory that is left.
    """
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        fraction = memory.default_fraction
    if not 0 < fraction <= 1:
        raise InvalidRequestError(
            f"kv_cache_config.free_gpu_memory_fraction is {fraction}; it must be in (0, 1]",
            field="kv_cache_config.free_gpu_memory_fraction",
        )
    block_bytes = spec.kv_bytes_per_block
    usable = max_batch_size * -(-spec.max_seq_len // spec.tokens_per_block)
    bounds = {
        f"{fraction:.0%} of {memory.source}": int(memory.num_bytes * fraction) // block_bytes,
        f"{max_batch_size} sequences of {spec.max_seq_len} tokens": usable,
    }
    if config.max_tokens is not None:
        bounds[f"max_tokens {config.max_tokens}"] = -(-config.max_tokens // spec.tokens_per_block)
    name, num_blocks = min(bounds.items(), key=lambda bound: bound[1])
    if num_blocks < 1:
        raise InvalidRequestError(
            f"the KV pool has no block: {name} gives {num_blocks} blocks of {block_bytes} bytes",
            field="kv_cache_config",
        )
    left = available_memory() if memory.on_gpu else memory.num_bytes - num_blocks * block_bytes
    if config.host_cache_size and config.host_cache_size > left:
        raise InvalidRequestError(
            f"kv_cache_config.host_cache_size is {_size(config.host_cache_size)}; "
            + (
                f"{_size(left)} of main memory are free"
                if memory.on_gpu
                else f"of {memory.source} {_size(left)} are left beside the pool's {num_blocks} blocks"
            ),
            field="kv_cache_config.host_cache_size",
        )
    host_blocks = _lower_blocks("host_cache_size", config.host_cache_size, block_bytes)
    disk_blocks = _lower_blocks("disk_cache_size", config.disk_cache_size, slot_bytes(block_bytes))
    tokens = num_blocks * spec.tokens_per_block
    lines = [
        f"{num_blocks} KV blocks of {spec.tokens_per_block} tokens ({tokens} tokens, "
        f"{_size(num_blocks * block_bytes)}): {name}"
    ]
    for tier, blocks, size, slot in (
        ("host", host_blocks, config.host_cache_size, block_bytes),
        ("disk", disk_blocks, config.disk_cache_size, slot_bytes(block_bytes)),
    ):
        if blocks:
            lines.append(
                f"{blocks} KV blocks in the {tier} tier ({blocks * spec.tokens_per_block} tokens): {tier}_cache_size "
                f"{_size(size or 0)} in blocks of {slot} bytes"
            )
    return PoolSize(num_blocks, host_blocks, disk_blocks, "\n".join(lines))


def _lower_blocks(field: str, num_bytes: int | None, slot: int) -> int:
    if not num_bytes:
        return 0
    if num_bytes < slot:
        raise InvalidRequestError(
            f"kv_cache_config.{field} is {num_bytes}; a block takes {slot} bytes, so it must be at least that, or 0",
            field=f"kv_cache_config.{field}",
        )
    return num_bytes // slot


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def available_memory() -> int:
    """Bytes of main memory that can be taken without swapping (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
