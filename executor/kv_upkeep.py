"""What the loop does for the KV cache beside running plans: copies between tiers, and a look for leaks when idle."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batch_manager import BatchManager, KvCacheManager
from executor.kv_tiers import BlockMover

_logger = logging.getLogger(__name__)


class KvUpkeep:
    """Between the block manager, which orders copies, and the mover, which makes them.

    The loop's thread makes all calls, under the BatchManager's lock; none of them waits for a copy.
    """

    def __init__(self, batch_manager: BatchManager, kv: KvCacheManager, mover: BlockMover | None) -> None:
        """Bind.

        Args:
            batch_manager: has the requests that wait for copies.
            kv: orders copies.
            mover: makes them; `None` where there are no tiers below the device.
        """
        self._batch_manager = batch_manager
        self._kv = kv
        self._mover = mover

    def start(self, wake: Callable[[], None]) -> None:
        """Args: `wake` is called, on any thread, when `acknowledge` has something to do."""
        if self._mover is not None:
            self._mover.start(wake)

    def acknowledge(self) -> None:
        """Take over the copies that are done: who waited for one can run, or, where it failed, begins again."""
        if self._mover is None:
            return
        for transfer_id, succeeded in self._mover.take_finished():
            disappointed = self._kv.acknowledge_transfer(transfer_id, succeeded)
            if disappointed:
                self._batch_manager.restart(disappointed)

    def order(self) -> None:
        """Hand over the copies that are wanted now: loads after planning, and after an update what it released, before
        the next plan can give it to others."""
        if self._mover is not None:
            self._mover.submit(self._kv.take_transfers())

    def on_idle(self) -> None:
        """The last live request has ended: what it left is backed up, and what is held nevertheless is a leak."""
        if self._kv.may_have_leaks:
            self._report_leaks()
        self.order()

    def _report_leaks(self) -> None:
        for leak in self._kv.find_leaks(()):
            _logger.error(
                "%d KV blocks leaked, held by %s since iteration %s (%s): %s; they are quarantined",
                len(leak.block_ids),
                leak.owner,
                leak.iteration,
                leak.call,
                leak.block_ids,
            )

    def failures(self) -> dict[str, int]:
        """Copies that failed since the start, by what happened."""
        return {} if self._mover is None else self._mover.failures()
