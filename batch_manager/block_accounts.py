"""The scheduler's side of the KV blocks: who has which, what is promised to whom, what is on its way back."""

from __future__ import annotations

from typing import Protocol

from batch_manager.kv import NO_BLOCK, KvCacheManager, Reuse
from batch_manager.kv.reuse import NO_REUSE
from batch_manager.plan import BlockCopy
from batch_manager.policies.capacity import Reservations, tokens_to_completion
from batch_manager.request import Request


class BlockAccounts(Protocol):
    """What the BatchManager asks of the blocks. Blocks only change hands through it."""

    num_blocks: int
    tokens_per_block: int
    reservations: Reservations
    num_promised_blocks: int
    """Of those on their way back, the ones requests of this iteration wait for."""

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that become free when the steps in flight end, or copies between tiers."""
        ...

    def is_protected(self, request: Request) -> bool:
        """Whether it must not be paused (again)."""
        ...

    def num_protected_blocks(self, request: Request) -> int:
        """Blocks to completion of a protected request, 0 for others."""
        ...

    def find_reuse(self, request: Request) -> Reuse: ...

    def num_held_blocks(self, request: Request) -> int:
        """Blocks that a request gives back when it is paused."""
        ...

    def num_new_blocks(self, request: Request, num_tokens: int, reuse: Reuse | None) -> int:
        """Free blocks it takes to admit a request and let it grow to `num_tokens` positions."""
        ...

    def is_loading(self, request: Request) -> bool:
        """Whether blocks of a running request are on their way from a lower tier."""
        ...

    def start(self, request: Request, reuse: Reuse, now: float) -> list[BlockCopy] | None:
        """Blocks for the context of a request that is admitted, and the reservation for the rest. None: short."""
        ...

    def can_spare(self, request: Request, num_tokens: int, num_running: int) -> bool:
        """Whether `cover` for positions that are only welcome leaves what others will need."""
        ...

    def shortage(self, request: Request, num_tokens: int) -> int:
        """Blocks that are missing before `cover` can succeed; 0 or less: none."""
        ...

    def cover(self, request: Request, num_tokens: int, now: float) -> bool:
        """Let the block table cover `num_tokens` positions; False: short, nothing has changed."""
        ...

    def store(self, request: Request, num_tokens: int) -> None:
        """Make full blocks below `num_tokens` findable."""
        ...

    def store_last(self, request: Request, num_tokens: int) -> None:
        """Make what a request that ends has computed findable up to `num_tokens`, a block that is not full included."""
        ...

    def release(self, request: Request, now: float) -> None:
        """Take everything back."""
        ...

    def begin_step(self, iteration: int) -> None: ...

    def end_step(self, iteration: int) -> None: ...


class PagedBlocks:
    """Blocks of a `KvCacheManager`."""

    def __init__(self, kv: KvCacheManager, max_pauses: int) -> None:
        self.kv = kv
        self.num_blocks = kv.num_blocks
        self.tokens_per_block = kv.tokens_per_block
        self.reservations = Reservations(kv.num_blocks)
        self.num_promised_blocks = 0
        self._max_pauses = max_pauses
        self._most_growing_blocks = kv.most_growing_blocks
        self._peaks: dict[int, int] = {}
        """With an attention window: of running requests, by id."""
        self._sum_of_peaks = 0

    @property
    def num_free_blocks(self) -> int:
        return self.kv.num_free_blocks

    @property
    def num_returning_blocks(self) -> int:
        return self.kv.num_fenced_blocks + self.kv.num_blocks_in_transfer

    def is_protected(self, request: Request) -> bool:
        return request.num_pauses >= self._max_pauses

    def num_protected_blocks(self, request: Request) -> int:
        return self.num_blocks_for(tokens_to_completion(request)) if self.is_protected(request) else 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def find_reuse(self, request: Request) -> Reuse:
        reuse = self.kv.find_reuse(request)
        if request.num_remote_tokens and reuse.partial is not None:
            # What another instance sends is whole blocks, so a part is not worth a copy.
            return reuse._replace(num_tokens=reuse.num_tokens - reuse.partial.num_tokens, partial=None)
        return reuse

    def num_held_blocks(self, request: Request) -> int:
        return self.kv.num_held_blocks(request)

    def num_new_blocks(self, request: Request, num_tokens: int, reuse: Reuse | None) -> int:
        num_context_tokens = len(request.token_ids)
        most = self._most_growing_blocks
        if most is None or reuse is None or num_tokens <= num_context_tokens:
            return self.kv.num_new_blocks(request, num_tokens, reuse)
        # A block found is no block less to come: it may fall out of this request's window while others keep it. So
        # the most that this and all running ones can hold must fit the pool together, whatever they share now.
        peak = self._peak(request, most)
        num_held = self.num_blocks_for(num_context_tokens) - reuse.block_ids.count(NO_BLOCK)
        now = self.kv.num_new_blocks(request, num_context_tokens, reuse) + max(0, peak - num_held)
        num_unpromised = self.num_blocks - self.kv.pins.num_pinned_blocks - self._sum_of_peaks
        return max(now, peak - num_unpromised + self.num_free_blocks - self.reservations.growth)

    def _peak(self, request: Request, most_growing_blocks: int) -> int:
        """Blocks a request holds at most, from its admission with the tokens it has now until it ends."""
        num_context_blocks = self.num_blocks_for(len(request.token_ids))
        return min(self.num_blocks_for(tokens_to_completion(request)), max(num_context_blocks, most_growing_blocks))

    def _reserve(self, request: Request) -> None:
        """Reserve what a running request may still take."""
        growth = self.num_blocks_for(tokens_to_completion(request)) - len(request.block_ids)
        if self._most_growing_blocks is not None:
            held = self.kv.num_held_blocks(request)
            growth = max(0, min(growth, self._peaks[request.request_id] - held))
        self.reservations.growth += growth - request.num_reserved_blocks
        request.num_reserved_blocks = growth

    def can_spare(self, request: Request, num_tokens: int, num_running: int) -> bool:
        free, growth = self.num_free_blocks, self.reservations.growth
        if self._most_growing_blocks is None:
            return free >= min(growth, num_running + 1)
        # What is taken ahead is not given back sooner, so it must not be what others were promised.
        num_taken = self.num_blocks_for(num_tokens) - len(request.block_ids)
        return free - growth >= num_taken - min(num_taken, request.num_reserved_blocks)

    def is_loading(self, request: Request) -> bool:
        return self.kv.is_loading(request)

    def start(self, request: Request, reuse: Reuse, now: float) -> list[BlockCopy] | None:
        copies = self.kv.allocate(request, len(request.token_ids), reuse)
        if copies is None:
            return None
        size = self.tokens_per_block
        request.num_allocated_tokens = len(request.block_ids) * size
        request.next_store = (request.num_computed_tokens // size + 1) * size
        if self._most_growing_blocks is not None:
            peak = self._peaks[request.request_id] = self._peak(request, self._most_growing_blocks)
            self._sum_of_peaks += peak
        self._reserve(request)
        self.reservations.protected += self.num_protected_blocks(request)
        request.receipt.start(now, request.num_reused_tokens)
        return copies

    def shortage(self, request: Request, num_tokens: int) -> int:
        return self.kv.num_new_blocks(request, num_tokens) - self.kv.num_free_blocks

    def cover(self, request: Request, num_tokens: int, now: float) -> bool:
        num_before = self.kv.num_held_blocks(request)
        if self.kv.allocate(request, num_tokens) is None:
            return False
        request.receipt.hold(now, num_before)
        request.num_allocated_tokens = len(request.block_ids) * self.tokens_per_block
        self._reserve(request)
        return True

    def store(self, request: Request, num_tokens: int) -> None:
        size = self.tokens_per_block
        request.next_store = (num_tokens // size + 1) * size
        self.kv.store(request, num_tokens)
        if self._most_growing_blocks is not None:
            self._reserve(request)

    def store_last(self, request: Request, num_tokens: int) -> None:
        self.kv.store_last_block(request, num_tokens)

    def release(self, request: Request, now: float) -> None:
        num_blocks = self.kv.num_held_blocks(request)
        request.receipt.stop(now, num_blocks, request.num_reused_tokens, request.num_computed_tokens)
        self.reservations.growth -= request.num_reserved_blocks
        self._sum_of_peaks -= self._peaks.pop(request.request_id, 0)
        self.reservations.protected -= self.num_protected_blocks(request)
        self.kv.release(request)
        request.num_reserved_blocks = 0
        request.num_allocated_tokens = 0

    def begin_step(self, iteration: int) -> None:
        self.kv.begin_step(iteration)

    def end_step(self, iteration: int) -> None:
        self.kv.end_step(iteration)


class NoBlocks:
    """For engines without a KV cache: nothing is ever short."""

    num_blocks = 0
    tokens_per_block = 1
    num_free_blocks = 0
    num_returning_blocks = 0

    def __init__(self) -> None:
        self.reservations = Reservations(0)
        self.num_promised_blocks = 0

    def is_protected(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def num_protected_blocks(self, request: Request) -> int:  # noqa: ARG002
        return 0

    def find_reuse(self, request: Request) -> Reuse:  # noqa: ARG002
        return NO_REUSE

    def num_held_blocks(self, request: Request) -> int:  # noqa: ARG002
        return 0

    def num_new_blocks(self, request: Request, num_tokens: int, reuse: Reuse | None) -> int:  # noqa: ARG002
        return 0

    def is_loading(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def start(self, request: Request, reuse: Reuse, now: float) -> list[BlockCopy] | None:  # noqa: ARG002
        request.num_computed_tokens = request.num_reused_tokens = 0
        request.num_allocated_tokens = request.max_num_tokens
        request.next_store = request.max_num_tokens
        request.receipt.start(now, 0)
        return []

    def can_spare(self, request: Request, num_tokens: int, num_running: int) -> bool:  # noqa: ARG002
        return True

    def shortage(self, request: Request, num_tokens: int) -> int:  # noqa: ARG002
        return 0

    def cover(self, request: Request, num_tokens: int, now: float) -> bool:  # noqa: ARG002
        return True

    def store(self, request: Request, num_tokens: int) -> None:
        """There is nothing to store."""

    def store_last(self, request: Request, num_tokens: int) -> None:
        """There is nothing to store."""

    def release(self, request: Request, now: float) -> None:
        request.receipt.stop(now, 0, 0, request.num_computed_tokens)

    def begin_step(self, iteration: int) -> None:
        """No fences."""

    def end_step(self, iteration: int) -> None:
        """No fences."""
