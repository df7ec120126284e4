"""A KvCacheManager whose callers beside the BatchManager can be watched: transfers, remote loads, leases, pins.

The BatchManager's own calls follow from its decisions and are not told; what the executor asks of the cache does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from batch_manager.kv import BlockTransfer, KvCacheConfig, KvCacheManager, Leak, Pin
from batch_manager.request import Request
from batch_manager.trace.clock import InstantClock

KvResult = int | list[int] | list[list[int]] | None
"""What of a call's result is compared."""


class KvCall(NamedTuple):
    """A call that changed the cache, from outside the BatchManager."""

    now: float
    name: str
    """Of the method."""
    arguments: list[int | float | bool | str | None]
    """A live request by its id."""
    request: Request | None
    """Of `pin` and `lease_prefix`: it need not be live."""
    result: KvResult


class KvObserver(Protocol):
    def on_kv_call(self, call: KvCall) -> None: ...


class ObservedKvCacheManager(KvCacheManager):
    """A KvCacheManager that tells observers what is asked of it from outside the BatchManager.

    Args:
        config: as of the KvCacheManager.
        clock: that of the BatchManager; while it stands still, calls are the BatchManager's.
    """

    def __init__(self, config: KvCacheConfig, clock: InstantClock) -> None:
        super().__init__(config, clock)
        self._instant = clock
        self._observers: tuple[KvObserver, ...] = ()

    def watch(self, observers: Sequence[KvObserver]) -> None:
        """Tell `observers` from now on."""
        self._observers += tuple(observers)

    def _tell(
        self,
        now: float,
        name: str,
        result: KvResult,
        *arguments: int | float | bool | str | None,
        request: Request | None = None,
    ) -> None:
        for observer in self._observers:
            observer.on_kv_call(KvCall(now, name, list(arguments), request, result))

    def take_transfers(self) -> list[BlockTransfer]:
        with self._instant.instant() as now:
            orders = super().take_transfers()
        if self.cache.transfers is not None:
            self._tell(now, "take_transfers", slots_of(orders))
        return orders

    def acknowledge_transfer(self, transfer_id: int, succeeded: bool) -> list[Request]:
        with self._instant.instant() as now:
            disappointed = super().acknowledge_transfer(transfer_id, succeeded)
        self._tell(now, "acknowledge_transfer", ids_of(disappointed), transfer_id, succeeded)
        return disappointed

    def expect_remote_load(self, request: Request, num_tokens: int) -> None:
        with self._instant.instant() as now:
            super().expect_remote_load(request, num_tokens)
        self._tell(now, "expect_remote_load", None, request.request_id, num_tokens)

    def take_remote_loads(self) -> list[Request]:
        with self._instant.instant() as now:
            admitted = super().take_remote_loads()
        if admitted:
            self._tell(now, "take_remote_loads", ids_of(admitted))
        return admitted

    def acknowledge_remote_load(self, request: Request) -> None:
        with self._instant.instant() as now:
            super().acknowledge_remote_load(request)
        self._tell(now, "acknowledge_remote_load", None, request.request_id)

    def lease(self, request: Request, owner: str) -> int:
        with self._instant.instant() as now:
            lease_id = super().lease(request, owner)
        self._tell(now, "lease", lease_id, request.request_id, owner)
        return lease_id

    def lease_prefix(self, request: Request, owner: str) -> tuple[int, list[int]] | None:
        with self._instant.instant() as now:
            leased = super().lease_prefix(request, owner)
        self._tell(now, "lease_prefix", prefix_of(leased), owner, request=request)
        return leased

    def end_lease(self, lease_id: int) -> None:
        with self._instant.instant() as now:
            super().end_lease(lease_id)
        self._tell(now, "end_lease", None, lease_id)

    def pin(self, request: Request, seconds: float | None = None) -> Pin:
        with self._instant.instant() as now:
            pin = super().pin(request, seconds)
        self._tell(now, "pin", pin.pin_id, seconds, request=request)
        return pin

    def unpin(self, pin_id: int) -> None:
        with self._instant.instant() as now:
            super().unpin(pin_id)
        self._tell(now, "unpin", None, pin_id)

    def clear(self) -> None:
        with self._instant.instant() as now:
            super().clear()
        self._tell(now, "clear", None)

    def find_leaks(self, live_request_ids: Iterable[int]) -> list[Leak]:
        live = sorted(live_request_ids)
        with self._instant.instant() as now:
            leaks = super().find_leaks(live)
        self._tell(now, "find_leaks", len(leaks), *live)
        return leaks

    def free_quarantined(self) -> int:
        with self._instant.instant() as now:
            count = super().free_quarantined()
        self._tell(now, "free_quarantined", count)
        return count

    def refresh(self) -> None:
        if self._instant.is_frozen:
            super().refresh()
            return
        with self._instant.instant() as now:
            super().refresh()
        self._tell(now, "refresh", None)


def slots_of(orders: Iterable[BlockTransfer]) -> list[list[int]]:
    """[orders, 5] id, source tier and slot, target tier and slot; not the hash, which a redacted trace cannot tell."""
    return [[int(number) for number in order[:5]] for order in orders]


def prefix_of(leased: tuple[int, list[int]] | None) -> list[list[int]] | None:
    """The lease and its blocks."""
    return None if leased is None else [[leased[0]], leased[1]]


def ids_of(requests: Iterable[Request]) -> list[int]:
    return [request.request_id for request in requests]


def repeat(call: KvCall, kv: KvCacheManager, live: Mapping[int, Request]) -> KvResult:
    """Make a recorded call again, and return its result.

    Raises:
        KeyError: the request of a lease, or of a load, is not in `live`.
        ValueError: there is no such call.
    """
    match call.name, call.arguments:
        case "take_transfers", []:
            return slots_of(kv.take_transfers())
        case "acknowledge_transfer", [int(transfer_id), bool(succeeded)]:
            return ids_of(kv.acknowledge_transfer(transfer_id, succeeded))
        case "expect_remote_load", [int(request_id), int(num_tokens)]:
            kv.expect_remote_load(live[request_id], num_tokens)
        case "take_remote_loads", []:
            return ids_of(kv.take_remote_loads())
        case "acknowledge_remote_load", [int(request_id)]:
            kv.acknowledge_remote_load(live[request_id])
        case "lease", [int(request_id), str(owner)]:
            return kv.lease(live[request_id], owner)
        case "lease_prefix", [str(owner)] if call.request is not None:
            return prefix_of(kv.lease_prefix(call.request, owner))
        case "end_lease", [int(lease_id)]:
            kv.end_lease(lease_id)
        case "pin", [(int() | float() | None) as seconds] if call.request is not None:
            return kv.pin(call.request, seconds).pin_id
        case "unpin", [int(pin_id)]:
            kv.unpin(pin_id)
        case "clear", []:
            kv.clear()
        case "find_leaks", [*live_ids]:
            return len(kv.find_leaks(int(request_id) for request_id in live_ids if isinstance(request_id, int)))
        case "free_quarantined", []:
            return kv.free_quarantined()
        case "refresh", []:
            kv.refresh()
        case _:
            raise ValueError(f"{call.name}{tuple(call.arguments)} is no call of a KvCacheManager")
    return None
