"""The sending side: contexts that are complete, leased until they are acknowledged or nobody asks for them any more.

```
 offer ─► CONTEXT_TRANS_IN_PROGRESS ──── Close from every rank ───► CONTEXT_COMPLETE
             │  ▲ Open, Heartbeat put the deadline off                   ▲
             └──┴─────────── deadline passes ────────────────────────────┘
```
Receivers read; a sender never writes to anybody. So the end of a lease needs no consent: whoever still reads afterwards
reads what its checksum does not fit, and throws it away.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batch_manager import KvCacheManager, Request
from executor.transfer.integrity import BLOCKS_PER_CHECKSUM, IdentityError, ModelIdentity, checksums, prompt_digest
from executor.transfer.layout import IncompatibleLayoutError, KvLayout, check_compatible
from executor.transfer.leases import Deadlines
from executor.transfer.messages import identity_from, layout_from, memory_message
from executor.transfer.stats import TransferStats
from executor.transfer.transport import PoolMemory
from protos.inflight.v1 import transfer_pb2 as pb

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Offer:
    """One leased context."""

    context_id: int
    lease_id: int
    prompt_digest: bytes
    block_ids: list[int]
    """Of the context's tokens, as they were when the lease began; the lease keeps their content."""
    num_tokens: int
    checksums: list[int] | None = None
    """Of all blocks, once they have been computed."""
    is_open: bool = False
    """Whether a receiver may be reading it."""
    acknowledged: set[int] = field(default_factory=set)
    """Ranks of the receiver that are done."""


class ContextSender:
    """Offers contexts and answers for them. Safe to use from any thread, but for what says otherwise."""

    def __init__(
        self,
        instance_id: bytes,
        kv: KvCacheManager,
        lock: threading.Condition,
        identity: ModelIdentity,
        layout: KvLayout,
        regions: Sequence[NDArray[np.uint8]],
        memory: PoolMemory,
        timeout: float,
        stats: TransferStats,
        on_freed: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            instance_id: this instance's.
            kv: holds the leases.
            lock: the BatchManager's; guards `kv` and everything here.
            identity: what this instance runs.
            layout: of its pool.
            regions: the pool.
            memory: the pool as receivers see it.
            timeout: seconds that a lease lasts after the last word of a receiver.
            stats: counts.
            on_freed: called, on any thread and with the lock, when blocks were given back.
        """
        self._instance_id = instance_id
        self._kv = kv
        self._lock = lock
        self._identity = identity
        self._layout = layout
        self._regions = regions
        self._memory = memory_message(memory)
        self._timeout = timeout
        self._stats = stats
        self._on_freed = on_freed
        self._ids = itertools.count(1)
        self._offers: dict[int, Offer] = {}
        self._deadlines: Deadlines[int] = Deadlines()

    # -- the loop's thread, with the lock -----------------------------------------------------------------------------

    def offer(self, lease_id: int, block_ids: list[int], num_tokens: int, prompt_digest: bytes) -> int:
        """Offer a context whose blocks are leased; returns its id. The lease is this object's from now on."""
        offer = Offer(next(self._ids), lease_id, prompt_digest, block_ids, num_tokens)
        self._offers[offer.context_id] = offer
        self._deadlines.set(offer.context_id, time.monotonic() + self._timeout)
        self._stats.num_offered += 1
        return offer.context_id

    def block_ids_of(self, context_id: int) -> list[int]:
        """Of a context that is leased; none of another."""
        with self._lock:
            offer = self._offers.get(context_id)
            return [] if offer is None else offer.block_ids

    # -- calls of receivers -------------------------------------------------------------------------------------------

    def open(self, request: pb.OpenRequest) -> pb.OpenResponse:
        """See `Transfer.Open`."""
        try:
            identity_from(request.identity).check_same(self._identity)
            check_compatible(self._layout, layout_from(request.layout))
        except (IdentityError, IncompatibleLayoutError) as error:
            return pb.OpenResponse(outcome=pb.OPEN_OUTCOME_REFUSED, reason=str(error))
        with self._lock:
            offer = self._renew(request.instance_id, request.context_id)
        if offer is None:
            return pb.OpenResponse(outcome=pb.OPEN_OUTCOME_NOT_THERE, reason="its lease has ended, or it never was")
        if request.prompt_digest != offer.prompt_digest:
            return pb.OpenResponse(outcome=pb.OPEN_OUTCOME_REFUSED, reason="the context is another prompt's")
        if request.first_token >= offer.num_tokens:
            reason = f"first_token is {request.first_token}; the context has {offer.num_tokens} tokens"
            return pb.OpenResponse(outcome=pb.OPEN_OUTCOME_REFUSED, reason=reason)
        first = request.first_token // self._layout.tokens_per_block
        found = self._checksums(offer) if first == 0 else checksums(self._regions, offer.block_ids[first:])
        with self._lock:
            # What was read for the checksums is the context's only if the lease lasted until now.
            if self._offers.get(offer.context_id) is not offer:
                return pb.OpenResponse(outcome=pb.OPEN_OUTCOME_NOT_THERE, reason="its lease has just ended")
            offer.is_open = True
        return pb.OpenResponse(
            outcome=pb.OPEN_OUTCOME_OPENED,
            begin_token=first * self._layout.tokens_per_block,
            end_token=offer.num_tokens,
            block_ids=offer.block_ids[first:],
            checksums=found,
            blocks_per_checksum=BLOCKS_PER_CHECKSUM,
            is_complete=True,
            lease_ms=int(self._timeout * 1000),
            memory=self._memory,
        )

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """See `Transfer.Heartbeat`."""
        with self._lock:
            ended = [each for each in request.context_ids if self._renew(request.instance_id, each) is None]
        return pb.HeartbeatResponse(ended_context_ids=ended)

    def close(self, request: pb.CloseRequest) -> pb.CloseResponse:
        """See `Transfer.Close`."""
        with self._lock:
            offer = self._find(request.instance_id, request.context_id)
            if offer is None:
                return pb.CloseResponse(was_leased=False)
            offer.acknowledged.add(request.rank)
            if len(offer.acknowledged) >= max(1, request.num_ranks):
                self._stats.num_sent += request.outcome == pb.CLOSE_OUTCOME_RECEIVED
                self._end(offer)
        return pb.CloseResponse(was_leased=True)

    def find(self, request: pb.FindRequest) -> tuple[Offer, bytes] | None:
        """Lease what is cached of a prompt, as if it were a context; also returns its digest. `None`: nothing is."""
        try:
            identity_from(request.identity).check_same(self._identity)
            check_compatible(self._layout, layout_from(request.layout))
        except (IdentityError, IncompatibleLayoutError):
            return None
        if not request.token_ids:
            return None
        token_ids = list(request.token_ids)
        salt = request.cache_salt_id if request.HasField("cache_salt_id") else None
        with self._lock:
            leased = self._kv.lease_prefix(Request(0, token_ids, 1, cache_salt=salt), "prefix for another instance")
            if leased is None:
                return None
            lease_id, block_ids = leased
            num_tokens = len(block_ids) * self._layout.tokens_per_block
            digest = prompt_digest(token_ids[:num_tokens], salt)
            return self._offers[self.offer(lease_id, block_ids, num_tokens, digest)], digest

    # -- the transfer thread ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compute the checksums of new contexts, before anybody asks for them."""
        with self._lock:
            waiting = [offer for offer in self._offers.values() if offer.checksums is None]
        for offer in waiting:
            self._checksums(offer)

    def reap(self, now: float) -> None:
        """End the leases whose time is over."""
        with self._lock:
            for context_id in self._deadlines.pop_expired(now):
                self._stats.num_expired += 1
                _logger.warning(
                    "nobody has asked for context %d in %.1f s; its blocks are given back", context_id, self._timeout
                )
                self._end(self._offers[context_id])

    @property
    def next_deadline(self) -> float | None:
        """When `reap` has something to do, if nobody asks before."""
        with self._lock:
            return self._deadlines.next_deadline

    def withdraw_all(self) -> None:
        """End every lease: the instance shuts down."""
        with self._lock:
            for offer in list(self._offers.values()):
                self._end(offer)

    @property
    def is_being_read(self) -> bool:
        """Whether a receiver has opened a context; one that reads ahead of its Open is not known here yet."""
        with self._lock:
            return any(offer.is_open for offer in self._offers.values())

    @property
    def num_offers(self) -> int:
        """Contexts that are leased now."""
        return len(self._offers)

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _find(self, instance_id: bytes, context_id: int) -> Offer | None:
        offer = self._offers.get(context_id) if instance_id == self._instance_id else None
        self._stats.num_late_messages += offer is None
        return offer

    def _renew(self, instance_id: bytes, context_id: int) -> Offer | None:
        offer = self._find(instance_id, context_id)
        if offer is not None:
            self._deadlines.set(context_id, time.monotonic() + self._timeout)
        return offer

    def _end(self, offer: Offer) -> None:
        del self._offers[offer.context_id]
        self._deadlines.discard(offer.context_id)
        self._kv.end_lease(offer.lease_id)
        self._on_freed()

    # -- without it ---------------------------------------------------------------------------------------------------

    def _checksums(self, offer: Offer) -> list[int]:
        """Two threads may compute the same: that costs time, and nothing else."""
        found = offer.checksums
        if found is None:
            found = checksums(self._regions, offer.block_ids)
            with self._lock:
                if self._offers.get(offer.context_id) is offer:
                    offer.checksums = found
        return found
