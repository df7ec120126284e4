"""Short ways to put requests through a KV manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.request import Request


def manager(num_blocks: int, tokens_per_block: int = 16, **options: Any) -> KvCacheManager:
    return KvCacheManager(KvCacheConfig(num_blocks=num_blocks, tokens_per_block=tokens_per_block, **options))


class Requests:
    """Numbers requests and runs them on one manager."""

    def __init__(self, kv: KvCacheManager) -> None:
        self.kv = kv
        self.next_id = 0

    def new(self, tokens: Sequence[int], **options: Any) -> Request:
        self.next_id += 1
        return Request(self.next_id - 1, tokens, 100, **options)

    def admit(self, tokens: Sequence[int], **options: Any) -> Request:
        """Holds blocks for its prompt, what was cached adopted; nothing computed or stored yet."""
        request = self.new(tokens, **options)
        assert self.kv.allocate(request, len(tokens), self.kv.find_reuse(request)) is not None
        return request

    def compute(self, tokens: Sequence[int], **options: Any) -> Request:
        """Admitted, its prompt computed and stored."""
        request = self.admit(tokens, **options)
        self.kv.store(request, len(request.token_ids))
        return request

    def serve(self, tokens: Sequence[int], **options: Any) -> Request:
        """Computed and done: what it leaves is cached."""
        request = self.compute(tokens, **options)
        self.kv.release(request)
        return request

    def num_found(self, tokens: Sequence[int], **options: Any) -> int:
        return self.kv.find_reuse(self.new(tokens, **options)).num_tokens

    def generate(self, request: Request, tokens: Sequence[int]) -> None:
        """More tokens, allocated, computed and stored one by one."""
        for token in tokens:
            request.token_ids.append(token)
            assert self.kv.allocate(request, len(request.token_ids)) == []
            self.kv.store(request, len(request.token_ids))


def blocks_of(*values: int, tokens_per_block: int = 16) -> list[int]:
    """Whole blocks, each of one repeated token."""
    return [value for value in values for _ in range(tokens_per_block)]
