"""Why a request does not advance: put together when somebody asks, from what the last iteration left behind."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from batch_manager.admission import Admission, Blocked
from batch_manager.lifecycle import Lifecycle
from batch_manager.micro_batch import Stalled
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.request import Request, RequestState

MAX_HOLDERS = 8
KV_CODES = (WaitCode.KV_RESERVATION, WaitCode.KV_CAPACITY, WaitCode.PAUSE_HEADROOM)


def explain(
    request: Request, life: Lifecycle, admission: Admission, stalled: list[Stalled], is_paused: bool
) -> WaitReason | None:
    """Why `request` waits, or why it did not advance in the last iteration although it runs; None: it advanced."""
    if request.state is RequestState.RUNNING:
        return _explain_running(request, life, admission.config.max_batch_size, stalled, is_paused)
    if request.parked is not None:
        return request.parked
    if is_paused:
        return WaitReason(WaitCode.PAUSED_BY_OPERATOR, 1, 0)
    blocked = admission.blocked
    if blocked is None or blocked.request.is_finished:
        return WaitReason(WaitCode.NEXT_ITERATION, 0, 0)
    if blocked.request is request:
        return WaitReason(blocked.code, blocked.needed, blocked.available, _holders(blocked.code, life))
    return _explain_behind(request, life, blocked)


def _explain_running(
    request: Request, life: Lifecycle, max_batch_size: int, stalled: list[Stalled], is_paused: bool
) -> WaitReason | None:
    if is_paused:
        return WaitReason(WaitCode.PAUSED_BY_OPERATOR, 1, 0)
    for entry in stalled:
        if entry.request is request:
            return WaitReason(entry.code, entry.needed, entry.available, _holders(entry.code, life))
    if request in life.running[max_batch_size:]:  # it was lowered while more were running
        needed = len(life.running)
        return WaitReason(WaitCode.BATCH_SIZE, needed, max_batch_size, _holders(WaitCode.BATCH_SIZE, life))
    return None


def _explain_behind(request: Request, life: Lifecycle, blocked: Blocked) -> WaitReason:
    """The first in line keeps everybody behind it waiting, or `request`'s tenant keeps it behind."""
    queue = life.waiting.queue
    first = blocked.request
    own_service, first_service = queue.service(request), queue.service(first)
    if request.tenant != first.tenant and own_service > first_service:
        return WaitReason(WaitCode.FAIR_SHARE, round(own_service), round(first_service), behind=first.request_id)
    return WaitReason(
        blocked.code, blocked.needed, blocked.available, _holders(blocked.code, life), behind=first.request_id
    )


def _holders(code: WaitCode, life: Lifecycle) -> tuple[int, ...]:
    """The running requests that hold most of what `code` is about."""
    amount: Callable[[Request], int]
    if code in KV_CODES:
        amount = lambda request: len(request.block_ids)  # noqa: E731
    elif code is WaitCode.ADAPTER_PAGES:
        amount = lambda request: request.adapter_pages if request.adapter_id is not None else 0  # noqa: E731
    else:
        amount = lambda request: request.num_computed_tokens  # noqa: E731
    most = heapq.nlargest(MAX_HOLDERS, life.running, key=amount)
    return tuple(request.request_id for request in most if amount(request) > 0)
