"""Prefixes that stay in the device pool until unpinned, within a quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from batch_manager.kv.block import CachedBlock
from batch_manager.kv.cache import PrefixCache
from batch_manager.kv.errors import BlockOwnershipError, PinError, PinQuotaError
from batch_manager.kv.leases import LeaseBook


class Pin(NamedTuple):
    pin_id: int
    num_tokens: int
    """Tokens of the prefix that are pinned: whole blocks."""
    num_blocks: int


class PinnedPath(NamedTuple):
    """A pin as the account of blocks shows it."""

    pin_id: int
    block_ids: list[int]
    iteration: int
    """In which it was taken."""
    expires_at: float | None
    """On the manager's clock; `None`: it stays until `unpin`."""


class PinBook:
    """Pins, and how many distinct blocks they keep; `quota` of them at most."""

    def __init__(self, leases: LeaseBook, quota: int, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._clock = clock
        self._paths: dict[int, list[CachedBlock]] = {}
        self._num_pins: Counter[CachedBlock] = Counter()
        self.quota = quota

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._num_pins)

    def pin(self, path: list[CachedBlock], cache: PrefixCache, iteration: int, seconds: float | None) -> Pin:
        """Pin the blocks of `path`, which are on the device.

        Raises:
            PinError: `path` is empty.
            PinQuotaError: it needs more blocks than the quota has left.
        """
        if not path:
            raise PinError("no full block of this prefix is cached; compute it first, then pin it")
        added = sum(node not in self._num_pins for node in path)
        if self.num_pinned_blocks + added > self.quota:
            raise PinQuotaError(
                f"pinning {len(path)} blocks takes {added} more, but {self.num_pinned_blocks} of at most {self.quota} "
                "are pinned already; unpin something or raise max_pinned_fraction"
            )
        expires_at = None if seconds is None else self._clock() + seconds
        lease = self._leases.take("pin", iteration, "pin", cache.holders(path), expires_at=expires_at)
        self._paths[lease.lease_id] = path
        self._num_pins.update(path)
        return Pin(lease.lease_id, len(path) * cache.tokens_per_block, len(path))

    def pins(self) -> list[PinnedPath]:
        """Every pin, the oldest first."""
        leases = self._leases.leases
        return [
            PinnedPath(pin_id, [node.block_id for node in path], leases[pin_id].iteration, leases[pin_id].expires_at)
            for pin_id, path in self._paths.items()
        ]

    def now(self) -> float:
        """On the clock of `expires_at`."""
        return self._clock()

    def unpin(self, pin_id: int) -> None:
        """Raises `BlockOwnershipError` when there is no such pin."""
        path = self._paths.pop(pin_id, None)
        if path is None:
            raise BlockOwnershipError(f"pin {pin_id} is not there: unpinned, expired, or never made")
        for node in path:
            self._num_pins[node] -= 1
            if not self._num_pins[node]:
                del self._num_pins[node]
        self._leases.end(pin_id)

    def unpin_expired(self) -> None:
        now = self._clock() if self._paths else 0.0
        for pin_id in list(self._paths):
            expires_at = self._leases.leases[pin_id].expires_at
            if expires_at is not None and expires_at <= now:
                self.unpin(pin_id)
