"""An instance that computes nothing: offers contexts and fetches them, to measure and to test transfers alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batch_manager import BatchManager, BatchManagerConfig, KvCacheManager, Request
from batch_manager.kv import KvCacheConfig
from executor.engines.interface import EngineSpec
from executor.transfer.context_state import ContextState
from executor.transfer.endpoint import TransferEndpoint
from executor.transfer.integrity import ModelIdentity, prompt_digest
from executor.transfer.peer import TransferNetwork

_IDENTITY = ModelIdentity(b"c" * 32, b"w" * 32, "float32")
_LONGEST = 1 << 20
"""Tokens in a context, which is taken in one step."""

_TOKEN = 1
"""Of which all prompts consist."""


class BarePool:
    """A pool filled with numbers of no meaning."""

    def __init__(self, spec: EngineSpec, num_blocks: int, seed: int = 0) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        random = np.random.default_rng(seed)
        shape = num_blocks, spec.kv_bytes_per_block // (2 * spec.num_layers)
        # Bytes below 64: small finite numbers in every element type, so that an engine can compute with them.
        self._regions = [random.integers(0, 64, shape, np.uint8) for _ in range(2 * spec.num_layers)]

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """See `Engine.kv_regions`."""
        return self._regions


def bare_spec(num_layers: int, num_kv_heads: int, head_size: int, tokens_per_block: int) -> EngineSpec:
    """What an engine with such blocks of float32 would have been built for."""
    return EngineSpec(
        vocab_size=_TOKEN + 1,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        tokens_per_block=tokens_per_block,
        max_batch_size=16,
        max_num_tokens=_LONGEST,
        max_input_len=_LONGEST,
        max_seq_len=_LONGEST,
        kv_bytes_per_block=2 * num_layers * num_kv_heads * head_size * tokens_per_block * 4,
    )


class BareInstance:
    """An endpoint whose loop is whoever calls: one thread makes all calls."""

    def __init__(
        self,
        network: TransferNetwork,
        spec: EngineSpec,
        num_blocks: int,
        *,
        timeout: float,
        seed: int = 0,
        identity: ModelIdentity = _IDENTITY,
        kv_dtype: str = "float32",
        listen: str = "127.0.0.1:0",
    ) -> None:
        """Begin.

        Args:
            network: how it is reached.
            spec: of its pool.
            num_blocks: of its pool.
            timeout: seconds that leases last and transfers may take.
            seed: what the pool is filled by.
            identity: what it claims to run.
            kv_dtype: what it claims that its pool keeps.
            listen: HOST:PORT for calls of peers.
        """
        self.pool = BarePool(spec, num_blocks, seed)
        self.kv = KvCacheManager(
            KvCacheConfig(num_blocks=num_blocks, tokens_per_block=spec.tokens_per_block, enable_block_reuse=False)
        )
        limits = BatchManagerConfig(max_batch_size=16, max_num_tokens=_LONGEST)
        self._manager = BatchManager(limits, self.kv)
        self._lock = threading.Condition()
        self._woken = threading.Event()
        self._next_id = 1
        self._timeout = timeout
        self.endpoint = TransferEndpoint(
            network, listen, self.pool, identity, kv_dtype, self.kv, self._manager, timeout
        )
        self.endpoint.start(self._lock, self._woken.set)

    def offer(self, num_tokens: int, cache_salt: int | None = None) -> ContextState:
        """Offer a context of so many tokens, as if it had just been computed."""
        digest = prompt_digest([_TOKEN] * num_tokens, cache_salt)
        with self._lock:
            request = Request(self._new_id(), [_TOKEN] * num_tokens, 1)
            self._manager.add_request(request)
            self.endpoint.expect_context_only(request)
            plan = self._manager.schedule()
            self.endpoint.keep(plan)
            self._manager.update(plan, [[_TOKEN]])
            offered = self.endpoint.offer(lambda _: digest)
            self.endpoint.forget(request.request_id)
        return self.endpoint.context_state(offered[request.request_id], num_tokens, digest, [])

    def fetch(self, state: ContextState) -> tuple[float, list[int] | None]:
        """Fetch a context.

        Returns:
            Seconds until it may be used, and its blocks; `None` in their place: it did not come whole.
        """
        request = Request(
            self._new_id(), [_TOKEN] * state.num_tokens, 8, generated_token_ids=[_TOKEN],
            num_remote_tokens=state.num_tokens,
        )  # fmt: skip
        started = time.perf_counter()
        with self._lock:
            self._manager.add_request(request)
            self.endpoint.expect_generation_only(request, state)
            self._manager.schedule()
            self.endpoint.begin()
            block_ids = request.block_ids[: -(-state.num_tokens // self.kv.tokens_per_block)]
        while True:
            self._woken.wait(self._timeout)
            self._woken.clear()
            with self._lock:
                if self.endpoint.settle():
                    break
        seconds = time.perf_counter() - started
        has_come = request.num_computed_tokens == state.num_tokens
        with self._lock:
            self._manager.cancel_request(request.request_id)
            self.endpoint.forget(request.request_id)
        return seconds, block_ids if has_come else None

    def read(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """`[blocks, bytes]`, as `Engine.read_block` gives them."""
        return np.concatenate([region[list(block_ids)] for region in self.pool.kv_regions()], 1)

    def close(self) -> None:
        self.endpoint.close()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
