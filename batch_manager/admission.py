"""Admission: waiting requests become running ones, in the order of the line, until something is used up.

What stopped it in the last iteration is kept with its numbers: that is the reason for which everybody in line waits.
"""

from __future__ import annotations

from typing import NamedTuple

from batch_manager.config import BatchManagerConfig
from batch_manager.lifecycle import Lifecycle
from batch_manager.micro_batch import MicroBatch
from batch_manager.plan import BlockCopy
from batch_manager.policies.capacity import CapacityPolicy
from batch_manager.reasons import WaitCode
from batch_manager.request import Request


class Blocked(NamedTuple):
    """The first in line and why it was not admitted."""

    request: Request
    code: WaitCode
    needed: int
    available: int


class Admission:
    """Admits from the line."""

    MAX_PARKED = 64
    """So many requests at most are parked in one iteration: planning it takes bounded time however many wait."""
    PROBE_INTERVAL = 8
    """Iterations after which a request that lacked blocks is looked up in the cache again, even though no blocks came
    free: a prefix of it may have been stored meanwhile."""

    def __init__(self, config: BatchManagerConfig, lifecycle: Lifecycle, capacity: CapacityPolicy) -> None:
        self.config = config
        self.capacity = capacity
        self.blocked: Blocked | None = None
        self.candidate: Request | None = None
        """The request that is being looked at."""
        self.copies: list[BlockCopy] = []
        """Block copies that requests admitted so far begin with, for the next step that runs: an admitted request may
        have to wait for other blocks, and where nobody else runs, its iteration is not executed."""
        self._lifecycle = lifecycle
        self._next_probe = 0
        """Iteration of the next look-up for the blocked request, unless blocks come free before."""

    def take_copies(self) -> list[BlockCopy]:
        """For a step that runs."""
        copies, self.copies = self.copies, []
        return copies

    def admit(self, batch: MicroBatch, num_running_before: int) -> None:
        """Admit all that fit in this iteration."""
        queue = self._lifecycle.waiting.queue
        num_parked = 0
        while (request := queue.peek()) is not None:
            self.candidate = request
            blocked = self._try_admit(request, batch, num_running_before)
            self.candidate = None
            if blocked is not None:
                self.blocked = blocked
                return
            num_parked += request.parked is not None
            if num_parked == self.MAX_PARKED:
                break
        self.blocked = None

    def _try_admit(self, request: Request, batch: MicroBatch, num_running_before: int) -> Blocked | None:
        """Take the first in line out of it, to admit or to park it; otherwise say what is missing."""
        lifecycle, blocks = self._lifecycle, self._lifecycle.blocks
        num_running = len(lifecycle.running)
        if not self.capacity.is_open(num_running_before):
            return Blocked(request, WaitCode.STATIC_BATCH, 0, num_running_before)
        if num_running >= self.config.num_active_limit:
            return Blocked(request, WaitCode.BATCH_SIZE, num_running + 1, self.config.num_active_limit)
        if batch.rows_left < self.config.min_rows_per_sequence:
            return Blocked(request, WaitCode.TOKEN_BUDGET, self.config.min_rows_per_sequence, batch.rows_left)
        if lifecycle.is_kv_short or request in lifecycle.settling:
            return self._blocked_after_shortage(request)
        if not lifecycle.adapters.fits(request):
            needed = lifecycle.adapters.num_needed_pages(request)
            num_free = lifecycle.adapters.num_free_pages
            if self.capacity.stops_at_adapter_shortfall:
                return Blocked(request, WaitCode.ADAPTER_PAGES, needed, num_free)
            lifecycle.park_for_adapter(request)
            return None
        entry = self.capacity.entry(request, blocks.num_protected_blocks(request), blocks.reservations)
        available = max(0, blocks.num_free_blocks - entry.num_withheld_blocks)
        known = self.blocked
        if (
            known is not None
            and known.request is request
            and available < known.needed
            and lifecycle.iteration < self._next_probe
            and lifecycle.running
        ):
            return Blocked(request, entry.code, known.needed, available)
        reuse = blocks.find_reuse(request)
        if self.capacity.defers_prefixes and self.config.enable_prefix_deferral:
            contributor = lifecycle.deferral.contributor(reuse.first_missing_key)
            if contributor is not None:
                lifecycle.defer(request, contributor, reuse.num_tokens)
                return None
        needed = blocks.num_new_blocks(request, entry.num_tokens, reuse)
        if needed > available and reuse.partial is not None:
            # A block that is copied from stays as well: where that one is too many, its tokens are computed.
            reuse = reuse._replace(num_tokens=reuse.num_tokens - reuse.partial.num_tokens, partial=None)
            needed = blocks.num_new_blocks(request, entry.num_tokens, reuse)
        if needed > available:
            self._next_probe = lifecycle.iteration + self.PROBE_INTERVAL
            return Blocked(request, entry.code, needed, available)
        num_remaining = len(request.token_ids) - reuse.num_tokens
        if not batch.can_claim(request, num_remaining):
            return Blocked(request, WaitCode.TOKEN_BUDGET, num_remaining, batch.rows_left)
        copies = lifecycle.admit(request, reuse)
        if copies is None:
            return Blocked(request, entry.code, needed, available)
        self._next_probe = 0
        self.copies += copies
        if not blocks.is_loading(request):
            batch.add_context(request)
        return None

    def _blocked_after_shortage(self, request: Request) -> Blocked:
        """What is free in an iteration in which a running request lacked blocks is kept for those that run."""
        blocks = self._lifecycle.blocks
        needed, num_free = -(-len(request.token_ids) // blocks.tokens_per_block), blocks.num_free_blocks
        if needed > num_free:
            return Blocked(request, WaitCode.KV_CAPACITY, needed, num_free)
        return Blocked(request, WaitCode.PAUSE_HEADROOM, needed, 0)

    def make_room(self) -> None:
        """Pause running requests that rank below the first ones in line, where these lack a place or blocks and get
        them that way.

        Only under policies that pause at all, and only where the line has ranks: all requests, running or not, are
        walked in one order there, and what there is goes to the earlier ones.
        """
        lifecycle = self._lifecycle
        queue = lifecycle.waiting.queue
        if not self.capacity.pauses_lower_ranks or not queue.has_ranks or not lifecycle.running:
            return
        request = queue.peek()
        if request is None or request.order_key > lifecycle.running[-1].order_key:
            return
        outranked = [running for running in reversed(lifecycle.running) if not lifecycle.blocks.is_protected(running)]
        first_in_line: list[Request] = []
        room = RoomToMake(self.config.num_active_limit, lifecycle)
        while request is not None and outranked and request.order_key < outranked[0].order_key:
            queue.pop()
            first_in_line.append(request)
            needed = self._needed_blocks(request)
            if needed is None or not room.make(request, needed, outranked):
                break
            request = queue.peek()
        for request in first_in_line:
            queue.push(request)
        if room.is_made:
            lifecycle.sweep()

    def _needed_blocks(self, request: Request) -> int | None:
        """Blocks that have to be free before `request` is admitted; None: it waits for something else."""
        lifecycle, blocks = self._lifecycle, self._lifecycle.blocks
        if not lifecycle.adapters.fits(request):
            return None
        reuse = blocks.find_reuse(request)
        if lifecycle.deferral.contributor(reuse.first_missing_key) is not None:
            return None
        entry = self.capacity.entry(request, blocks.num_protected_blocks(request), blocks.reservations)
        reuse = reuse._replace(partial=None)
        return blocks.num_new_blocks(request, entry.num_tokens, reuse) + entry.num_withheld_blocks


class RoomToMake:
    """Places and blocks that are left in this iteration while lower ranks are paused for higher ones."""

    def __init__(self, num_active_limit: int, lifecycle: Lifecycle) -> None:
        blocks = lifecycle.blocks
        self.is_made = False
        """Whether anybody was paused."""
        self._lifecycle = lifecycle
        self._num_places = num_active_limit - len(lifecycle.running)
        self._num_blocks = blocks.num_free_blocks + blocks.num_returning_blocks
        self._num_blocks -= sum(request.needs_block() for request in lifecycle.running)

    def make(self, request: Request, num_needed_blocks: int, outranked: list[Request]) -> bool:
        """Pause from the front of `outranked` what ranks below `request` until it fits; False: it cannot."""
        num_places, num_blocks = self._num_places - 1, self._num_blocks - num_needed_blocks
        num_victims = 0
        while num_places < 0 or num_blocks < 0:
            if num_victims == len(outranked) or outranked[num_victims].order_key < request.order_key:
                return False
            num_places += 1
            num_blocks += self._lifecycle.blocks.num_held_blocks(outranked[num_victims])
            num_victims += 1
        self._num_places, self._num_blocks = num_places, num_blocks
        for victim in outranked[:num_victims]:
            self._lifecycle.pause(victim, WaitCode.KV_CAPACITY, request)
            self.is_made = True
        del outranked[:num_victims]
        return True
