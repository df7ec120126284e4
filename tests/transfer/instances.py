"""Executors that exchange contexts in this process, and requests that go through two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor import (
    CacheTransceiverConfig,
    ContextPhaseParams,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    RequestType,
    Result,
)
from executor.transfer.local_network import LocalNetwork
from tests.executor.driving import run_one, wait_until

OpenInstance = Callable[..., Executor]


def instance(
    engine_dir: Path,
    network: LocalNetwork | None,
    *,
    reuse: bool = True,
    timeout_ms: int = 20_000,
    role: str = "both",
    listen: str = "127.0.0.1:0",
    max_tokens: int | None = None,
    kv_cache_dtype: str | None = None,
    peers: Sequence[str] = (),
    **config: Any,
) -> Executor:
    """An executor that takes part in transfers."""
    transceiver = CacheTransceiverConfig(
        network=network, kv_transfer_timeout_ms=timeout_ms, role=role, listen=listen, peers=list(peers)
    )
    kv = KvCacheConfig(enable_block_reuse=reuse, max_tokens=max_tokens, kv_cache_dtype=kv_cache_dtype)
    return Executor(
        engine_dir,
        ExecutorConfig(kv_cache_config=kv, cache_transceiver_config=transceiver, deterministic=True, **config),
    )


def context_only(request: Request) -> Request:
    return replace(request, type=RequestType.REQUEST_TYPE_CONTEXT_ONLY, streaming=False)


def generation_only(request: Request, params: ContextPhaseParams) -> Request:
    return replace(request, type=RequestType.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=params)


def run_disaggregated(context: Executor, generation: Executor, request: Request) -> Result:
    """The result of a request whose context one instance computes and whose generation another one."""
    first = run_one(context, context_only(request))
    if first.context_phase_params is None:
        return first
    return run_one(generation, generation_only(request, first.context_phase_params))


def num_free_blocks(executor: Executor) -> int:
    with executor._loop.batch_manager_lock:
        return executor._kv.num_free_blocks


def wait_until_free(executor: Executor) -> None:
    """All blocks are free or evictable again, and the books are in order."""
    wait_until(lambda: num_free_blocks(executor) == executor.pool_size.num_blocks)
    with executor._loop.batch_manager_lock:
        executor._kv.check_invariants()
