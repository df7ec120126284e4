"""Looking into the KV cache and pinning prefixes, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from batch_manager import KvCacheManager
from batch_manager import Request as ScheduledRequest
from batch_manager.kv import BlockOwnershipError, PinError, PinnedPath, PinQuotaError
from executor.api.errors import InvalidRequestError, PinQuotaExceededError
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.kv_upkeep import KvUpkeep

_NO_REQUEST = -1
"""Id of what is pinned for: it never runs."""


class KvAccount:
    """The block manager as operators see it."""

    def __init__(self, kv: KvCacheManager, upkeep: KvUpkeep, lock: threading.Condition) -> None:
        """Args: `lock` is the BatchManager's."""
        self._kv = kv
        self._upkeep = upkeep
        self._lock = lock

    def ledger(self) -> KvLedger:
        """O(blocks)."""
        with self._lock:
            ledger, stats, pins = self._kv.ledger(), self._kv.stats(), self._kv.pins.pins()
            pinned = tuple(self._shown(pin) for pin in pins)
        return KvLedger(
            counts=ledger.counts,
            entries=tuple(ledger.entries),
            lost_blocks=tuple(sorted(ledger.lost_blocks)),
            host=stats.host,
            disk=stats.disk,
            offloaded_blocks=stats.offloaded_blocks,
            onboarded_blocks=stats.onboarded_blocks,
            failed_transfers=stats.failed_transfers,
            failures_by_kind=self._upkeep.failures(),
            quarantined_blocks=stats.quarantined_blocks,
            pins=pinned,
            max_pinned_blocks=self._kv.pins.quota,
        )

    def pin(self, token_ids: Sequence[int], cache_salt_id: int | None, duration: timedelta | None) -> PinnedPrefix:
        """See `Executor.pin_prefix`."""
        if not token_ids:
            raise InvalidRequestError("input_token_ids is empty; it must be the prefix to pin", field="input_token_ids")
        if duration is not None and duration <= timedelta(0):
            raise InvalidRequestError(f"duration is {duration}; it must be positive", field="duration")
        prefix = ScheduledRequest(_NO_REQUEST, list(token_ids), 1, cache_salt=cache_salt_id)
        seconds = None if duration is None else duration.total_seconds()
        with self._lock:
            try:
                pin_id = self._kv.pin(prefix, seconds).pin_id
            except PinQuotaError as error:
                raise PinQuotaExceededError(str(error)) from None
            except PinError as error:
                raise InvalidRequestError(str(error), field="input_token_ids") from None
            return self._shown(next(pin for pin in self._kv.pins.pins() if pin.pin_id == pin_id))

    def unpin(self, pin_id: int) -> None:
        """See `Executor.unpin_prefix`."""
        with self._lock:
            try:
                self._kv.unpin(pin_id)
            except BlockOwnershipError as error:
                raise InvalidRequestError(str(error), field="pin_id") from None

    def _shown(self, pin: PinnedPath) -> PinnedPrefix:
        left = None if pin.expires_at is None else max(0.0, pin.expires_at - self._kv.pins.now())
        return PinnedPrefix(pin.pin_id, len(pin.block_ids) * self._kv.tokens_per_block, tuple(pin.block_ids), left)
