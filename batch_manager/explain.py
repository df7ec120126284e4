"""Why a request does not advance: put together when somebody asks, from what the last iteration left behind."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from batch_manager.admission import Admission, Blocked
from batch_manager.kv import num_held
from batch_manager.lifecycle import Lifecycle
from batch_manager.micro_batch import Stalled
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.request import Request, RequestState

MAX_HOLDERS = 8
KV_CODES = (WaitCode.KV_RESERVATION, WaitCode.KV_CAPACITY, WaitCode.PAUSE_HEADROOM)


class Explainer:
    """Answers for any number of requests, as long as nothing changes in between."""

    def __init__(self, life: Lifecycle, admission: Admission, stalled: Sequence[Stalled], is_paused: bool) -> None:
        self._life = life
        self._admission = admission
        self._stalled = stalled
        self._is_paused = is_paused
        self._known_holders: dict[WaitCode, tuple[int, ...]] = {}

    def reason(self, request: Request) -> WaitReason | None:
        """Why `request` waits, or why it did not advance in the last iteration although it runs; None: it advanced."""
        if request.state is RequestState.RUNNING:
            return self._reason_of_running(request)
        if request.parked is not None:
            return self._reason_of_parked(request, request.parked)
        if self._is_paused:
            return WaitReason(WaitCode.PAUSED_BY_OPERATOR, 1, 0)
        blocked = self._admission.blocked
        if blocked is None or blocked.request.is_finished:
            return WaitReason(WaitCode.NEXT_ITERATION, 0, 0)
        if blocked.request is request:
            return WaitReason(blocked.code, blocked.needed, blocked.available, self._holders(blocked.code))
        return self._reason_of_behind(request, blocked)

    def _reason_of_running(self, request: Request) -> WaitReason | None:
        if self._is_paused:
            return WaitReason(WaitCode.PAUSED_BY_OPERATOR, 1, 0)
        for entry in self._stalled:
            if entry.request is request:
                return WaitReason(entry.code, entry.needed, entry.available, self._holders(entry.code))
        max_batch_size, running = self._admission.config.max_batch_size, self._life.running
        if request in running[max_batch_size:]:  # it was lowered while more were running
            return WaitReason(WaitCode.BATCH_SIZE, len(running), max_batch_size, self._holders(WaitCode.BATCH_SIZE))
        return None

    def _reason_of_parked(self, request: Request, parked: WaitReason) -> WaitReason:
        """As it was when the request was parked, but for pages, which come and go meanwhile."""
        if parked.code is not WaitCode.ADAPTER_PAGES:
            return parked
        adapters = self._life.adapters
        return WaitReason(
            parked.code, adapters.num_needed_pages(request), adapters.num_free_pages, self._holders(parked.code)
        )

    def _reason_of_behind(self, request: Request, blocked: Blocked) -> WaitReason:
        """The first in line keeps everybody behind it waiting, or `request`'s tenant keeps it behind."""
        queue = self._life.waiting.queue
        first = blocked.request
        own_service, first_service = queue.service(request), queue.service(first)
        if request.tenant != first.tenant and own_service > first_service:
            return WaitReason(WaitCode.FAIR_SHARE, round(own_service), round(first_service), behind=first.request_id)
        return WaitReason(
            blocked.code, blocked.needed, blocked.available, self._holders(blocked.code), behind=first.request_id
        )

    def _holders(self, code: WaitCode) -> tuple[int, ...]:
        """The running requests that hold most of what `code` is about."""
        holders = self._known_holders.get(code)
        if holders is None:
            amount = _amount_held(code)
            most = heapq.nlargest(MAX_HOLDERS, self._life.running, key=amount)
            holders = self._known_holders[code] = tuple(request.request_id for request in most if amount(request) > 0)
        return holders


def _amount_held(code: WaitCode) -> Callable[[Request], int]:
    """What a running request holds of what `code` is about."""
    if code in KV_CODES:
        return lambda request: num_held(request.block_ids)
    if code is WaitCode.ADAPTER_PAGES:
        return lambda request: request.adapter_pages if request.adapter_id is not None else 0
    return lambda request: request.num_computed_tokens
