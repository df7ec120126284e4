"""Moves blocks between stores while the engine computes.

```
 loop's thread                          lanes, a thread each
 submit(orders) ──┬─► memory  device ◄──► host      loads first: a request waits for them
                  └─► disk    anything ◄──► disk
 take_finished() ◄── in the order of submission for each target tier ──┘
        ▲ on_finished: there is something to take
```
Two lanes, so that a block in main memory never waits behind the disk. Orders in flight share no slot that is written,
so that lanes, and loads that overtake, cannot disturb each other.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batch_manager.kv import BlockTransfer, CacheTier
from executor.kv_tiers.errors import BlockLostError
from executor.kv_tiers.stores import BlockStore

_logger = logging.getLogger(__name__)


class FinishedTransfer(NamedTuple):
    transfer_id: int
    succeeded: bool


class BlockMover:
    """Owns the stores. `submit` and `take_finished` are for one thread."""

    def __init__(self, stores: Mapping[CacheTier, BlockStore], bytes_per_block: int) -> None:
        """Bind; `start` begins.

        Args:
            stores: by the tier that orders name.
            bytes_per_block: size of a block in every one of them.
        """
        self._stores = stores
        self._lock = threading.Lock()
        self._in_order: dict[CacheTier, deque[int]] = {tier: deque() for tier in stores}
        """By target tier: ids of transfers that have not been taken, as they were submitted."""
        self._results: dict[int, bool] = {}
        """Of those, the finished ones."""
        self._failures: Counter[str] = Counter()
        self._on_finished: Callable[[], None] = lambda: None
        self._memory_lane = _Lane("kv-memory", self._carry_out, bytes_per_block)
        self._disk_lane = _Lane("kv-disk", self._carry_out, bytes_per_block)

    def start(self, on_finished: Callable[[], None]) -> None:
        """Begin to carry orders out.

        Args:
            on_finished: called, on a lane's thread, when `take_finished` has something to give again.
        """
        self._on_finished = on_finished
        self._memory_lane.start()
        self._disk_lane.start()

    def submit(self, orders: Iterable[BlockTransfer]) -> None:
        """Queue orders; never waits for a copy."""
        for order in orders:
            with self._lock:
                self._in_order[order.target_tier].append(order.transfer_id)
            touches_disk = CacheTier.DISK in (order.source_tier, order.target_tier)
            (self._disk_lane if touches_disk else self._memory_lane).submit(order)

    def take_finished(self) -> list[FinishedTransfer]:
        """Transfers that are over, those to one tier in the order in which they were submitted."""
        taken: list[FinishedTransfer] = []
        with self._lock:
            for in_order in self._in_order.values():
                while in_order and in_order[0] in self._results:
                    transfer_id = in_order.popleft()
                    taken.append(FinishedTransfer(transfer_id, self._results.pop(transfer_id)))
        return taken

    def failures(self) -> dict[str, int]:
        """How many transfers failed since the start, by what happened: `damaged`, `short file`, `ENOSPC`, ..."""
        with self._lock:
            return dict(self._failures)

    def close(self) -> None:
        """Forget what is queued, wait for the copies being made, and close the stores."""
        self._memory_lane.stop()
        self._disk_lane.stop()
        for store in self._stores.values():
            store.close()

    def _carry_out(self, order: BlockTransfer, scratch: NDArray[np.uint8]) -> None:
        """On a lane's thread; whatever happens, the order has a result."""
        try:
            self._copy(order, scratch)
        except BlockLostError as error:
            self._note_failure(order, error.kind, error)
        except OSError as error:
            self._note_failure(order, errno.errorcode.get(error.errno or 0, "OSError"), error)
        except Exception as error:  # noqa: BLE001 - a fault of a store or the engine: a miss, and no end of the lane
            self._note_failure(order, type(error).__name__, error)
        else:
            self._note(order, True)

    def _copy(self, order: BlockTransfer, scratch: NDArray[np.uint8]) -> None:
        source, target = self._stores[order.source_tier], self._stores[order.target_tier]
        into = target.view(order.target_slot)
        if into is not None:
            source.read(order.source_slot, order.block_hash, into)
            return
        data = source.view(order.source_slot)
        if data is None:
            data = scratch
            source.read(order.source_slot, order.block_hash, data)
        target.write(order.target_slot, order.block_hash, data)

    def _note_failure(self, order: BlockTransfer, kind: str, error: Exception) -> None:
        with self._lock:
            self._failures[kind] += 1
            is_first = self._failures[kind] == 1
        if is_first:
            _logger.warning(
                "a KV block could not be moved from %s to %s (%s): %s; further failures of this kind are only counted",
                order.source_tier.name.lower(),
                order.target_tier.name.lower(),
                kind,
                error,
            )
        self._note(order, False)

    def _note(self, order: BlockTransfer, succeeded: bool) -> None:
        with self._lock:
            self._results[order.transfer_id] = succeeded
            is_next = self._in_order[order.target_tier][0] == order.transfer_id
        if is_next:  # else the one that all others wait for will tell
            self._on_finished()


class _Lane:
    """A thread that carries orders out, loads before all others."""

    def __init__(
        self,
        name: str,
        carry_out: Callable[[BlockTransfer, NDArray[np.uint8]], None],
        bytes_per_block: int,
    ) -> None:
        self._carry_out = carry_out
        self._scratch = np.empty(bytes_per_block, np.uint8)
        self._changed = threading.Condition()
        self._loads: deque[BlockTransfer] = deque()
        self._others: deque[BlockTransfer] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, order: BlockTransfer) -> None:
        with self._changed:
            (self._loads if order.target_tier is CacheTier.DEVICE else self._others).append(order)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (order := self._next()) is not None:
            self._carry_out(order, self._scratch)

    def _next(self) -> BlockTransfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._loads or self._others)
            if self._is_stopping:
                return None
            return (self._loads or self._others).popleft()
