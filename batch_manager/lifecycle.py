"""Live requests and what happens to them: arrive, be admitted, grow, be paused, finish.

```
            arrive              admit
 (caller) ─────────► WAITING ──────────► RUNNING ── finish ──► FINISHED
                        │      PAUSED ◄── pause │
                        │        └── admit ─────►
                        └──────────┴── finish ─────────────────► FINISHED
```
Only here do blocks, adapter pages, deferred followers and timers change hands, so that every way out of a state gives
back everything.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from batch_manager.block_accounts import BlockAccounts
from batch_manager.config import BatchManagerConfig
from batch_manager.kv import Reuse
from batch_manager.plan import BlockCopy
from batch_manager.policies.adapters import AdapterPages
from batch_manager.policies.deferral import PrefixDeferral
from batch_manager.policies.pause_governor import PauseGovernor
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.receipt import Pause
from batch_manager.request import FinishReason, Request, RequestState
from batch_manager.timers import DeadlineTimers
from batch_manager.waiting import WaitingRequests

by_order_key = attrgetter("order_key")


class Lifecycle:
    """All live requests and everything they hold."""

    def __init__(self, config: BatchManagerConfig, blocks: BlockAccounts) -> None:
        self.blocks = blocks
        self.requests: dict[int, Request] = {}
        """Live requests by id."""
        self.running: list[Request] = []
        """Those that hold blocks, by order key: the last one is paused first."""
        self.waiting = WaitingRequests(config)
        self.adapters = AdapterPages(config.num_adapter_pages)
        self.deferral = PrefixDeferral(
            blocks.tokens_per_block, lambda request: blocks.find_reuse(request).first_missing_key
        )
        self.governor = PauseGovernor()
        self.timers = DeadlineTimers()
        self.now = 0.0
        """When the current call into the BatchManager began."""
        self.iteration = 0
        self.paused: list[Request] = []
        """Paused in this iteration."""
        self.settling: list[Request] = []
        """Paused while a step they have a part in may be in flight: they are not admitted before it has ended, so that
        what it samples belongs to where they left off."""
        self.is_kv_short = False
        """Whether in this iteration a running request found no blocks: nobody is admitted then."""
        self.awaiting_blocks: list[Request] = []
        """Running requests whose blocks come back when a step in flight ends."""

    def begin_iteration(self, now: float, is_step_in_flight: bool) -> None:
        self.now = now
        self.paused = []
        if not is_step_in_flight:
            self.settling.clear()
        self.is_kv_short = False
        self.awaiting_blocks = []
        self.blocks.num_promised_blocks = 0

    def arrive(self, request: Request, parked: WaitReason | None) -> None:
        request.receipt.arrival_time = request.arrival_time
        self.requests[request.request_id] = request
        self.waiting.arrive(request, parked)
        self.timers.add(request)

    def admit(self, request: Request, reuse: Reuse) -> list[BlockCopy] | None:
        """Let the first in line run. None: blocks are short, nothing has changed."""
        copies = self.blocks.start(request, reuse, self.now)
        if copies is None:
            return None
        self.waiting.queue.pop()
        self.waiting.leave(request)
        request.state = RequestState.RUNNING
        request.context_end = len(request.token_ids)
        insort(self.running, request, key=by_order_key)
        self.deferral.register(request, reuse.first_missing_key)
        self.wake(self.adapters.acquire(request))
        self.charge(request, request.context_end)
        return copies

    def require(self, request: Request, num_tokens: int) -> bool:
        """Let a running request's blocks cover `num_tokens` positions, pausing the last started ones if need be.

        False: it cannot run in this iteration, since it was paused itself or since the blocks it needs come back only
        when a step in flight ends, or a copy between tiers.
        """
        blocks = self.blocks
        if request in self.awaiting_blocks:
            return False
        while not blocks.cover(request, num_tokens, self.now):
            self.is_kv_short = True
            shortage = blocks.shortage(request, num_tokens)
            if blocks.num_returning_blocks - blocks.num_promised_blocks >= shortage:
                blocks.num_promised_blocks += shortage
                self.awaiting_blocks.append(request)
                return False
            victim = self._last_pausable(request)
            self.pause(victim, WaitCode.KV_CAPACITY, request)
            if victim is request:
                return False
        self.charge(request, request.num_computed_tokens)
        return True

    def serve_protected(self) -> None:
        """Let protected requests take the block they need next before anything is scheduled, since others before them
        in the order may be paused for them."""
        if not self.blocks.reservations.protected:
            return
        for request in list(self.running):
            if request.needs_block() and self.blocks.is_protected(request):
                self.require(request, request.num_computed_tokens + 1)

    def try_cover(self, request: Request, num_tokens: int) -> None:
        """The same for positions that are only welcome: nobody is paused for them, in this iteration neither, since
        every running request may still take a block."""
        if self.blocks.can_spare(request, num_tokens, len(self.running)):
            self.blocks.cover(request, num_tokens, self.now)

    def _last_pausable(self, request: Request) -> Request:
        """Who is paused so that `request` gets blocks: the last one behind it, or itself. For a protected request the
        last one of all that is not protected."""
        is_protected = self.blocks.is_protected(request)
        for candidate in reversed(self.running):
            if candidate is request and not is_protected:
                break
            if candidate.state is RequestState.RUNNING and not self.blocks.is_protected(candidate):
                return candidate
        return request

    def pause(self, request: Request, reason: WaitCode, beneficiary: Request) -> None:
        """Take a running request's blocks; it keeps its place in the order and computes all its tokens again.

        It stays in `running` until `sweep`.
        """
        receipt = request.receipt
        receipt.pauses.append(Pause(self.iteration, reason, beneficiary.request_id, request.num_computed_tokens))
        self._give_up(request)
        request.num_pauses += 1
        self._back_to_line(request)
        self.governor.on_pause()
        self.paused.append(request)
        self.settling.append(request)

    def end_step(self, iteration: int) -> None:
        """A step has ended. Whoever was paused before can have had a part in no other one: at most one step is in
        flight while an iteration is planned."""
        self.blocks.end_step(iteration)
        self.settling.clear()

    def _back_to_line(self, request: Request) -> None:
        request.num_computed_tokens = 0
        request.num_reused_tokens = 0
        request.context_end = len(request.token_ids)
        if not request.num_drafts_in_flight:  # those being verified are taken back by `update`
            request.draft_token_ids.clear()
        request.state = RequestState.PAUSED
        self.waiting.enter(request)

    def restart(self, request: Request) -> None:
        """A running request lost the blocks it waited for: it computes all its tokens itself.

        It stays in `running` until `sweep`. This is nobody's pause: nobody gained by it.
        """
        self._give_up(request)
        self._back_to_line(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a live request in any state. A running one stays in `running` until `sweep`."""
        state = request.state
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if state is RequestState.RUNNING:
            self._give_up(request)
            self.governor.on_finish()
        else:
            self.waiting.forget(request)
            if request.parked is None:
                self.wake(self.adapters.forget(request))
        self.timers.forget(request)
        request.receipt.finish(self.now, state is RequestState.PAUSED)

    def sweep(self) -> None:
        """Drop those that no longer run from `running`."""
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]

    def wake(self, requests: Iterable[Request]) -> None:
        """Parked requests stand in line again. Where one may not, since it has never run and nothing is started any
        more, the next one that waits for its adapter does."""
        pending = deque(requests)
        while pending:
            request = pending.popleft()
            self.waiting.wake([request])
            if request.parked is not None:
                pending += self.adapters.forget(request)

    def reorder(self, config: BatchManagerConfig) -> None:
        """Order all live requests as `config` asks for."""
        self.waiting.reorder(config, self.requests.values())
        self.adapters.reorder()
        self.running.sort(key=by_order_key)

    def defer(self, request: Request, contributor: Request, num_cached_tokens: int) -> None:
        """Park the first in line until `contributor` has computed the prefix they share."""
        self.waiting.queue.pop()
        request.parked = WaitReason(
            WaitCode.PREFIX_DEFERRED,
            num_cached_tokens + 1,
            num_cached_tokens,
            holders=(contributor.request_id,),
        )
        self.deferral.follow(request, contributor, num_cached_tokens)

    def park_for_adapter(self, request: Request) -> None:
        """Park the first in line until there is room for its adapter."""
        self.waiting.queue.pop()
        request.parked = WaitReason(
            WaitCode.ADAPTER_PAGES, self.adapters.num_needed_pages(request), self.adapters.num_free_pages
        )
        self.adapters.park(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """The request's tenant has been served up to `num_tokens` of the request's tokens."""
        served_from = max(request.num_charged_tokens, request.num_reused_tokens)
        if num_tokens > served_from:
            self.waiting.queue.charge(request, num_tokens - served_from)
            request.num_charged_tokens = num_tokens

    def _give_up(self, request: Request) -> None:
        """Give back blocks and pages; whoever waits for them stands in line again."""
        self.charge(request, request.num_computed_tokens)
        self.blocks.release(request, self.now)
        self.wake(self.adapters.release(request))
        self.wake(self.deferral.end(request))
