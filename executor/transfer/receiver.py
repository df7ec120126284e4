"""The receiving side: generation-only requests whose context another instance has.

```
 expect ─► GENERATION_INIT ── admitted: blocks leased ──► GENERATION_TRANS_IN_PROGRESS
              │ heartbeats keep the peer's lease             │ Open, then reads, piece by piece
              │                                              ├─ all there, checksums right ─► GENERATION_TRANS_COMPLETE
              │ cancelled, or the peer's lease ended         └─ anything else ─► quiesce ─► ERROR: computed here
              ▼
            Close
```
Our own blocks stay leased until no read can write to them any more, whatever becomes of the request meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batch_manager import BatchManager, KvCacheManager, Request
from executor.transfer.background import give_way
from executor.transfer.context_state import ContextState
from executor.transfer.integrity import BLOCKS_PER_CHECKSUM, ModelIdentity
from executor.transfer.layout import KvLayout
from executor.transfer.lease_upkeep import LeaseUpkeep
from executor.transfer.link_meter import CostMeter
from executor.transfer.messages import identity_message, layout_message, memory_from
from executor.transfer.peer import PeerError, PeerLink, PendingCall
from executor.transfer.reception import BlockReader, ReceptionError
from executor.transfer.states import TransferState
from executor.transfer.stats import TransferStats
from executor.transfer.transport import PoolMemory, Region, Transport
from protos.inflight.v1 import transfer_pb2 as pb

_logger = logging.getLogger(__name__)

_WHILE_READING = 0.00005
"""Seconds between looks at reads in flight: reads only go on while they are looked at."""

_MEMORIES_KEPT = 64
"""Pools of peers that are remembered: peers come and go."""


@dataclass(slots=True, eq=False)
class Reception:
    """One request on its way."""

    request: Request
    context: ContextState
    state: TransferState = TransferState.GENERATION_INIT
    lease_id: int | None = None
    """Of our own blocks, while they may be written to."""
    block_ids: list[int] = field(default_factory=list)
    first_token: int = 0
    deadline: float = 0.0
    started: float = 0.0
    """`time.monotonic()` of the first word, and `ended` of the last byte."""
    ended: float = 0.0
    opening: PendingCall | None = None
    reader: BlockReader | None = None
    num_bytes: int = 0
    """That came."""
    outcome: ReceptionError | None = None
    """Why it failed."""
    is_cancelled: bool = False
    """The request has ended, or lost its blocks."""


class ContextReceiver:
    """Fetches contexts. The loop calls some methods, the transfer thread others; the lock guards what both touch."""

    def __init__(
        self,
        kv: KvCacheManager,
        batch_manager: BatchManager,
        lock: threading.Condition,
        transport: Transport,
        link_to: Callable[[str], PeerLink],
        identity: ModelIdentity,
        layout: KvLayout,
        regions: Sequence[NDArray[np.uint8]],
        timeout: float,
        stats: TransferStats,
        meter: CostMeter,
        on_change: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            kv: has the blocks.
            batch_manager: has the requests.
            lock: the BatchManager's.
            transport: reads.
            link_to: the way to a peer, by its address.
            identity: what this instance runs.
            layout: of its pool.
            regions: the pool.
            timeout: seconds from the first word to the last byte.
            stats: counts.
            meter: is told what transfers take.
            on_change: called when the loop has something to settle.
            on_news: called, on any thread, when `tick` has something to do.
        """
        self._kv = kv
        self._batch_manager = batch_manager
        self._lock = lock
        self._transport = transport
        self._link_to = link_to
        self._identity = identity_message(identity)
        self._layout = layout
        self._layout_message = layout_message(layout)
        self._regions = regions
        self._targets = [Region.of(region) for region in regions]
        self._memories: dict[bytes, PoolMemory] = {}
        """Pools of peers, by instance."""
        self._timeout = timeout
        self._stats = stats
        self._meter = meter
        self._on_change = on_change
        self._on_news = on_news
        self._checker = ThreadPoolExecutor(1, "transfer-checks", give_way)
        self._receptions: dict[int, Reception] = {}
        """By the scheduler's id of the request, from `expect` until it is closed and quiet."""
        self._ended: list[Reception] = []
        """Complete or failed, for the loop to settle."""
        self._quiescing: list[Reception] = []
        self._upkeep = LeaseUpkeep(link_to, timeout, on_news)

    # -- the loop's thread, with the lock -----------------------------------------------------------------------------

    def expect(self, request: Request, context: ContextState) -> None:
        """`request` was taken in; `context` says where its context lies."""
        self._receptions[request.request_id] = Reception(request, context)

    def begin(self) -> None:
        """After planning: lease the blocks of requests that have just been admitted."""
        for request in self._kv.take_remote_loads():
            reception = self._receptions[request.request_id]
            reception.first_token = request.num_computed_tokens
            if self._kv.is_loading(request):
                reception.lease_id = self._kv.lease(request, f"context of request {request.request_id}")
                reception.block_ids = list(request.block_ids)
            reception.started = time.monotonic()
            reception.deadline = reception.started + self._timeout
            reception.state = TransferState.GENERATION_TRANS_IN_PROGRESS  # last: the transfer thread goes by it

    def forget(self, request_id: int) -> None:
        """The request has ended; one that was never expected is left alone."""
        reception = self._receptions.get(request_id)
        if reception is not None:
            reception.is_cancelled = True

    def settle(self) -> list[Reception]:
        """Before planning: let requests run whose contexts are there, and those begin anew whose are not.

        Returns:
            What has ended since the last call.
        """
        ended, self._ended = self._ended, []
        for reception in ended:
            request = reception.request
            if reception.state is TransferState.GENERATION_TRANS_COMPLETE:
                if self._kv.is_loading(request):
                    self._kv.acknowledge_remote_load(request)
                self._end_lease(reception)
            elif self._kv.is_loading(request):
                self._batch_manager.restart([request])
            elif not request.is_finished:
                self._kv.expect_remote_load(request, 0)  # not admitted yet: it will compute its context
        return ended

    # -- the transfer thread ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Go on with everything as far as that is possible without waiting.

        Returns:
            Seconds after which to look again; `None`: not before something happens.
        """
        with self._lock:
            receptions = list(self._receptions.values())
        deadlines = []
        is_reading = False
        for reception in receptions:
            if self._advance(reception, now):
                deadlines.append(reception.deadline)
                is_reading |= reception.reader is not None and reception.reader.is_reading
        self._quiesce()
        self._keep_leases(now)
        if is_reading or self._quiescing:
            return _WHILE_READING
        if receptions:
            deadlines.append(self._upkeep.next_heartbeat)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _advance(self, reception: Reception, now: float) -> bool:
        """Whether it goes on."""
        if reception.is_cancelled:
            self._drop(reception, pb.CLOSE_OUTCOME_CANCELLED)
            return False
        if reception.outcome is not None:
            self._fail(reception, reception.outcome)
            return False
        if reception.state is not TransferState.GENERATION_TRANS_IN_PROGRESS:
            return False
        if reception.lease_id is None:  # our own cache had all of it
            self._drop(reception, pb.CLOSE_OUTCOME_RECEIVED)
            return False
        try:
            if now >= reception.deadline:
                raise ReceptionError("timeout", f"the context did not come in {self._timeout:g} s")
            if self._fetch(reception):
                self._complete(reception)
                return False
        except ReceptionError as error:
            self._fail(reception, error)
            return False
        except Exception as error:  # it fails this transfer, and no other
            _logger.exception("the transfer for request %d failed unexpectedly", reception.request.request_id)
            self._fail(reception, ReceptionError("internal", repr(error)))
            return False
        return True

    def _fetch(self, reception: Reception) -> bool:
        """Whether the context is there. Raises `ReceptionError` when it never will be."""
        if reception.opening is None:
            reception.opening = self._open(reception)
            reception.reader = self._read_ahead(reception)
        if (reception.reader is None or not reception.reader.is_proven) and reception.opening.done():
            opened = self._answer(reception, reception.opening)
            if reception.reader is None:
                reception.reader = self._reader(reception, self._memory_of(reception.context, opened), opened)
            else:
                reception.reader.prove(opened)
        return reception.reader is not None and reception.reader.advance()

    def _read_ahead(self, reception: Reception) -> BlockReader | None:
        """Begin to read before the peer has answered, where its memory and the context's blocks are known."""
        context = reception.context
        memory = self._memories.get(context.instance_id)
        size = context.layout.tokens_per_block
        if memory is None or len(context.block_ids) != -(-context.num_tokens // size):
            return None
        first = reception.first_token // size
        expected = pb.OpenResponse(
            begin_token=first * size,
            end_token=context.num_tokens,
            block_ids=context.block_ids[first:],
            blocks_per_checksum=BLOCKS_PER_CHECKSUM,
        )
        return self._reader(reception, memory, expected, is_proven=False)

    def _answer(self, reception: Reception, opening: PendingCall) -> pb.OpenResponse:
        try:
            opened: pb.OpenResponse = opening.answer()
        except PeerError as error:
            raise ReceptionError("unreachable", str(error)) from error
        if opened.outcome != pb.OPEN_OUTCOME_OPENED:
            kind = "lease ended" if opened.outcome == pb.OPEN_OUTCOME_NOT_THERE else "refused"
            raise ReceptionError(kind, opened.reason)
        if not opened.is_complete or opened.end_token != reception.context.num_tokens:
            raise ReceptionError("bad answer", "the peer has another number of tokens than it said")
        return opened

    def _reader(
        self, reception: Reception, memory: PoolMemory, opened: pb.OpenResponse, *, is_proven: bool = True
    ) -> BlockReader:
        return BlockReader(
            self._transport,
            memory,
            self._regions,
            self._targets,
            self._layout,
            reception.context.layout,
            reception.block_ids,
            opened,
            reception.first_token,
            self._checker,
            self._on_news,
            is_proven=is_proven,
        )

    def _memory_of(self, context: ContextState, opened: pb.OpenResponse) -> PoolMemory:
        """A peer's pool stays what it is as long as the instance lives."""
        memory = self._memories.get(context.instance_id)
        if memory is None:
            if len(self._memories) == _MEMORIES_KEPT:
                self._memories.clear()
            memory = self._memories[context.instance_id] = memory_from(opened.memory)
        return memory

    def _open(self, reception: Reception) -> PendingCall:
        context = reception.context
        request = pb.OpenRequest(
            instance_id=context.instance_id,
            context_id=context.context_id,
            prompt_digest=context.prompt_digest,
            identity=self._identity,
            layout=self._layout_message,
            first_token=reception.first_token,
            num_ranks=1,
        )
        return self._link_to(context.address).call("Open", request, self._timeout, self._on_news)

    def _complete(self, reception: Reception) -> None:
        assert reception.reader is not None, "only what was read completes"
        with self._lock:
            reception.state = TransferState.GENERATION_TRANS_COMPLETE
            self._stats.num_received += 1
            self._stats.num_received_tokens += reception.context.num_tokens - reception.first_token
            reception.num_bytes = reception.reader.num_bytes
            self._stats.num_received_bytes += reception.num_bytes
            reception.ended = time.monotonic()
            self._stats.transfer_seconds += reception.ended - reception.started
            del self._receptions[reception.request.request_id]
            self._ended.append(reception)
        self._meter.note_transfer(reception.context.address, reception.num_bytes, reception.ended - reception.started)
        self._on_change()
        self._upkeep.close(reception.context, pb.CLOSE_OUTCOME_RECEIVED)

    def _fail(self, reception: Reception, error: ReceptionError) -> None:
        """The request will compute its context; our blocks stay leased until nothing can write to them."""
        _logger.warning("request %d computes its context itself: %s", reception.request.request_id, error)
        reception.outcome = error
        with self._lock:
            reception.state = TransferState.ERROR
            self._stats.recomputed[error.kind] += 1
            del self._receptions[reception.request.request_id]
            self._ended.append(reception)
            self._retire(reception)
        self._on_change()
        self._upkeep.close(reception.context, pb.CLOSE_OUTCOME_FAILED)

    def _drop(self, reception: Reception, outcome: pb.CloseOutcome) -> None:
        """Nobody waits for it."""
        with self._lock:
            del self._receptions[reception.request.request_id]
            self._retire(reception)
        self._upkeep.close(reception.context, outcome)

    def _retire(self, reception: Reception) -> None:
        if reception.lease_id is not None:
            self._stats.num_quarantined_blocks += len(reception.block_ids)
            self._quiescing.append(reception)

    def _quiesce(self) -> None:
        """End the leases of blocks that nothing can write to any more."""
        quiet = [each for each in self._quiescing if each.reader is None or each.reader.cancel()]
        if quiet:
            with self._lock:
                for reception in quiet:
                    self._quiescing.remove(reception)
                    self._stats.num_quarantined_blocks -= len(reception.block_ids)
                    self._end_lease(reception)
            self._on_change()

    def _end_lease(self, reception: Reception) -> None:
        if reception.lease_id is not None:
            self._kv.end_lease(reception.lease_id)
            reception.lease_id = None

    def _keep_leases(self, now: float) -> None:
        with self._lock:
            receptions = list(self._receptions.values())
        ended = self._upkeep.follow()
        for reception in receptions:
            context = reception.context
            is_waiting = reception.state is TransferState.GENERATION_INIT
            if is_waiting and (context.instance_id, context.context_id) in ended:
                reception.outcome = ReceptionError("lease ended", "the peer's lease ended before blocks were free")
        self._upkeep.beat([reception.context for reception in receptions], now)

    # -- the end ------------------------------------------------------------------------------------------------------

    def quiesce_all(self, deadline: float) -> bool:
        """The instance shuts down: end all reads; whether that was possible until `deadline`."""
        with self._lock:
            for reception in self._receptions.values():
                reception.is_cancelled = True
        while True:
            self.tick(time.monotonic())
            if not self._receptions and not self._quiescing:
                self._checker.shutdown()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    @property
    def num_receptions(self) -> int:
        """Contexts that are awaited or on their way."""
        return len(self._receptions)
