"""A KV block manager whose requests may get their keys and values from another instance.

```
 expect(request) ──► BatchManager admits it: allocate() ──► on_room(request, missing tokens)
                     blocks are its own, nothing to compute           │ transfer
                     stalled as KV_LOADING                            ▼
                     runs ◄──────────────────────────────────── arrived(request)
```
So a transfer begins when the receiver has room, by the production capacity policies, and brings only what is not
cached there.
"""

from __future__ import annotations

from collections.abc import Callable

from batch_manager.kv import KvCacheConfig, KvCacheManager, Reuse
from batch_manager.plan import BlockCopy
from batch_manager.request import Request


class ReceivingKvCacheManager(KvCacheManager):
    """Blocks of an instance that receives.

    Args:
        config, clock: as of the KvCacheManager.
        on_room: called with an expected request that has its blocks, and the number of tokens to bring, maybe 0.
    """

    def __init__(
        self, config: KvCacheConfig, clock: Callable[[], float], on_room: Callable[[Request, int], None]
    ) -> None:
        super().__init__(config, clock)
        self._on_room = on_room
        self._expected: set[int] = set()
        """Requests whose tokens but the last exist elsewhere, and that have no room yet."""
        self._arriving: dict[int, Request] = {}

    def expect(self, request_id: int) -> None:
        """All tokens but the last of this request have their keys and values at another instance."""
        self._expected.add(request_id)

    def arrived(self, request_id: int) -> None:
        """What was missing is there: the request may run, and others find its blocks.

        One that was paused or ended meanwhile has given its blocks back: nothing happens.
        """
        request = self._arriving.pop(request_id, None)
        if request is not None:
            self.store(request, request.num_computed_tokens)

    def lose(self, request_id: int) -> list[Request]:
        """The other instance has gone: the request computes all its tokens itself.

        Returns:
            The request if it had blocks already: it holds none any more and must be restarted.
        """
        self._expected.discard(request_id)
        request = self._arriving.get(request_id)
        if request is None:
            return []
        request.receipt.num_transferred_tokens = 0
        self.release(request)
        request.num_computed_tokens = request.num_reused_tokens = 0
        return [request]

    def is_loading(self, request: Request) -> bool:
        return request.request_id in self._arriving or super().is_loading(request)

    def allocate(self, request: Request, num_tokens: int, reuse: Reuse | None = None) -> list[BlockCopy] | None:
        if reuse is None or request.request_id not in self._expected:
            return super().allocate(request, num_tokens, reuse)
        # A block that matches in part is brought whole: copying it here as well would save nothing.
        num_found = len(reuse.block_ids) * self.tokens_per_block
        copies = super().allocate(request, num_tokens, reuse._replace(partial=None, num_tokens=num_found))
        if copies is None:
            return None
        self._expected.remove(request.request_id)
        self._arriving[request.request_id] = request
        num_missing = len(request.token_ids) - 1 - request.num_computed_tokens
        request.num_computed_tokens += num_missing
        request.num_reused_tokens += num_missing
        request.receipt.num_transferred_tokens += num_missing
        self._on_room(request, num_missing)
        return copies

    def release(self, request: Request) -> None:
        self._arriving.pop(request.request_id, None)
        self._expected.discard(request.request_id)
        super().release(request)
