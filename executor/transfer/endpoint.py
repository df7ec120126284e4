"""An instance's part in transfers: what it offers, what it fetches, and the thread for both.

```
loop (with the BatchManager's lock)          transfer thread               calls of peers
  settle ── plan ── begin                      receiver.tick                 sender.open, heartbeat, close
  step ── keep ── update ── offer              sender.prepare, reap
```
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from batch_manager import BatchManager, FinishReason, IterationPlan, KvCacheManager, Request
from executor.engines.interface import EngineSpec
from executor.transfer.background import give_way
from executor.transfer.context_state import ContextState, GeneratedLogProb
from executor.transfer.integrity import ModelIdentity
from executor.transfer.layout import KvLayout
from executor.transfer.link_meter import CostMeter
from executor.transfer.lookup import Lookup, PeerLookup
from executor.transfer.messages import identity_message, layout_message, memory_message
from executor.transfer.peer import PeerLink, TransferNetwork
from executor.transfer.receiver import ContextReceiver, Reception
from executor.transfer.sender import ContextSender
from executor.transfer.stats import TransferStats
from executor.transfer.transport import PoolMemory, Region
from protos.inflight.v1 import transfer_pb2 as pb

_logger = logging.getLogger(__name__)

_QUIET_SECONDS = 5.0
"""How long a shutdown waits for reads that cannot be stopped."""

_WHILE_READ = 0.0005
"""Seconds between helps for peers that read from here."""

_PAUSE_AFTER_FAULT = 0.1
"""Seconds."""

_still_written_to: list[object] = []
"""Pools that a read might still write to although their executor is gone: never freed."""


class Pool(Protocol):
    """What transfers need of an engine."""

    @property
    def spec(self) -> EngineSpec: ...

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        """See `Engine.kv_regions`."""
        ...


class TransferEndpoint:
    """One instance's part in transfers."""

    def __init__(
        self,
        network: TransferNetwork,
        listen: str,
        pool: Pool,
        identity: ModelIdentity,
        kv_dtype: str,
        kv: KvCacheManager,
        batch_manager: BatchManager,
        timeout: float,
        peers: Sequence[str] = (),
    ) -> None:
        """Register the pool and answer peers.

        Args:
            network: how instances reach each other.
            listen: HOST:PORT for calls of peers; port 0 takes a free one.
            pool: an engine.
            identity: what it runs.
            kv_dtype: what the pool keeps keys and values in.
            kv: has the blocks.
            batch_manager: has the requests.
            timeout: seconds that leases last and transfers may take.
            peers: addresses of instances that are asked for what they have cached of a prompt.

        Raises:
            OSError: `listen` cannot be listened at.
            UnsupportedFeatureError: the network's library is not installed, or the pool not in main memory.
        """
        spec = pool.spec
        self.instance_id = secrets.token_bytes(16)
        self.identity = identity
        self.layout = KvLayout(
            kv_dtype,
            spec.tokens_per_block,
            spec.head_size,
            spec.num_layers,
            spec.num_kv_heads,
            (0, spec.num_layers),
            (0, spec.num_kv_heads),
        )
        self.stats = TransferStats()
        self._kv = kv
        self._batch_manager = batch_manager
        self._network = network
        self._listen = listen
        self._timeout = timeout
        self.meter = CostMeter()
        self._lookup = PeerLookup(peers, kv, self._link_to, identity, self.layout, self.meter, lambda: self._news.set())
        self._to_ask: list[Lookup] = []
        self._asked: list[Lookup] = []
        self._looked_up: list[Lookup] = []
        """Over, for the loop to settle."""
        self._to_close: list[Lookup] = []
        """Whose requests ended before they could fetch."""
        self._regions = pool.kv_regions()
        self._transport = network.open_transport(self.instance_id)
        self._transport.register(self._regions)
        self._memory = PoolMemory(
            self._transport.name, self._transport.metadata(), tuple(Region.of(region) for region in self._regions)
        )
        self._links: dict[str, PeerLink] = {}
        self._links_lock = threading.Lock()
        self._news = threading.Event()
        self._is_stopping = False
        self._contexts: set[int] = set()
        """Context-only requests, by the scheduler's id."""
        self._kept: list[tuple[Request, int, list[int]]] = []
        """Contexts that the step in flight completes: request, lease, block ids."""
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)

    def start(self, lock: threading.Condition, wake: Callable[[], None]) -> None:
        """Begin.

        Args:
            lock: the BatchManager's.
            wake: lets the loop look again; called with the lock or without.
        """
        self._lock = lock
        self._sender = ContextSender(
            self.instance_id,
            self._kv,
            lock,
            self.identity,
            self.layout,
            self._regions,
            self._memory,
            self._timeout,
            self.stats,
            wake,
        )
        self._receiver = ContextReceiver(
            self._kv,
            self._batch_manager,
            lock,
            self._transport,
            self._link_to,
            self.identity,
            self.layout,
            self._regions,
            self._timeout,
            self.stats,
            self.meter,
            wake,
            self._news.set,
        )
        self._wake = wake
        self._server = self._network.serve(self, self._listen)
        self.address = self._server.address
        self._thread.start()

    # -- the loop's thread, with the lock -----------------------------------------------------------------------------

    def expect_context_only(self, request: Request) -> None:
        """`request` was taken in; what it computes is for another instance."""
        self._contexts.add(request.request_id)

    def expect_generation_only(self, request: Request, context: ContextState) -> None:
        """`request` was taken in; another instance has computed its context."""
        self._receiver.expect(request, context)
        self._news.set()

    def looks_up(self, request: Request) -> bool:
        """Whether peers are worth asking for `request`, which is held for `REMOTE_KV` then, until `settle`."""
        return self._lookup.is_worth_asking(request)

    def look_up(self, request: Request, cache_salt: int | None) -> None:
        """`request` was taken in and is held: ask peers for what they have cached of its prompt."""
        self._to_ask.append(Lookup(request, cache_salt))
        self._news.set()

    def settle(self) -> list[Reception]:
        """Before planning: take over what has come, or will not come, since the last call, which is returned."""
        looked_up, self._looked_up = self._looked_up, []
        for lookup in looked_up:
            request = lookup.request
            if request.is_finished:
                if lookup.found is not None:
                    lookup.unwanted = [lookup.found]
                    self._to_close.append(lookup)
                    self._news.set()
                continue
            if lookup.found is not None:
                self._kv.expect_remote_load(request, lookup.found.num_tokens)
                self._receiver.expect(request, lookup.found)
                self.stats.num_found += 1
            self._batch_manager.release_hold(request.request_id)
        return self._receiver.settle()

    def begin(self) -> None:
        """After planning: fetch the contexts of those that were admitted."""
        self._receiver.begin()
        self._news.set()

    def keep(self, plan: IterationPlan) -> None:
        """Before `update`: lease the blocks of contexts that this step has completed, since their requests end now."""
        if not self._contexts:
            return
        for entry in plan.scheduled:
            request = entry.request
            if entry.samples and request.request_id in self._contexts and not request.is_finished:
                num_blocks = -(-request.num_prompt_tokens // self._kv.tokens_per_block)
                lease_id = self._kv.lease(request, f"context of request {request.request_id}")
                self._kept.append((request, lease_id, request.block_ids[:num_blocks]))

    def offer(self, prompt_digest_of: Callable[[Request], bytes | None]) -> dict[int, int]:
        """After `update`: offer the contexts that were kept, and let go of those whose request went no further.

        Args:
            prompt_digest_of: of a request that ended by length; `None` where nothing is left to generate.

        Returns:
            The contexts' ids, by the scheduler's id of the request.
        """
        offered = {}
        kept, self._kept = self._kept, []
        for request, lease_id, block_ids in kept:
            digest = prompt_digest_of(request) if request.finish_reason is FinishReason.LENGTH else None
            if digest is None:
                self._kv.end_lease(lease_id)
            else:
                offered[request.request_id] = self._sender.offer(lease_id, block_ids, request.num_prompt_tokens, digest)
        if offered:
            self._news.set()
        return offered

    def abandon(self) -> None:
        """Instead of `offer`: the step failed."""
        kept, self._kept = self._kept, []
        for _, lease_id, _ in kept:
            self._kv.end_lease(lease_id)

    def forget(self, request_id: int) -> None:
        """A request has ended; one that has nothing to do with transfers is left alone."""
        self._contexts.discard(request_id)
        self._receiver.forget(request_id)
        self._news.set()

    # -- any thread ---------------------------------------------------------------------------------------------------

    def context_state(
        self, context_id: int, num_tokens: int, prompt_digest: bytes, log_probs: list[GeneratedLogProb]
    ) -> ContextState:
        """What is handed to whoever continues a context that was offered."""
        return ContextState(
            self.instance_id,
            self.address,
            context_id,
            self.identity,
            self.layout,
            num_tokens,
            prompt_digest,
            log_probs,
            self._sender.block_ids_of(context_id),
        )

    @property
    def num_transfers(self) -> int:
        """Contexts that are leased for others, awaited, or on their way."""
        return self._sender.num_offers + self._receiver.num_receptions

    def answer(self, method: str, request: Any) -> Message:
        """See `TransferService.answer`."""
        match method:
            case "Describe":
                return pb.DescribeResponse(
                    instance_id=self.instance_id,
                    identity=identity_message(self.identity),
                    layout=layout_message(self.layout),
                    memory=memory_message(self._memory),
                )
            case "Open":
                opened = self._sender.open(request)
                self._news.set()
                return opened
            case "Heartbeat":
                return self._sender.heartbeat(request)
            case "Close":
                return self._sender.close(request)
            case "Find":
                return self._answer_find(request)
        raise ValueError(f"{method} is no call of this service")

    def _answer_find(self, request: pb.FindRequest) -> pb.FindResponse:
        found = self._sender.find(request)
        if found is None:
            return pb.FindResponse()
        self._news.set()
        offer, digest = found
        state = self.context_state(offer.context_id, offer.num_tokens, digest, [])
        return pb.FindResponse(num_tokens=offer.num_tokens, state=state.to_message())

    def _link_to(self, address: str) -> PeerLink:
        with self._links_lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = self._network.link(address)
            return link

    # -- the transfer thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        give_way()
        while not self._is_stopping:
            self._news.clear()
            try:
                delay = self._advance(time.monotonic())
            except Exception:  # a fault of our own; transfers time out meanwhile, and nothing else may suffer
                _logger.exception("transfers could not go on; they are tried again")
                delay = _PAUSE_AFTER_FAULT
            self._news.wait(delay)

    def _advance(self, now: float) -> float | None:
        """Returns seconds after which to look again; `None`: not before there are news."""
        self._sender.prepare()
        self._sender.reap(now)
        self._advance_lookups()
        delays = [self._receiver.tick(now)]
        if self._sender.is_being_read:
            self._transport.progress()
            delays.append(_WHILE_READ)
        deadline = self._sender.next_deadline
        if deadline is not None:
            delays.append(max(0.0, deadline - time.monotonic()))
        return min((delay for delay in delays if delay is not None), default=None)

    def _advance_lookups(self) -> None:
        with self._lock:
            to_ask, self._to_ask = self._to_ask, []
            to_close, self._to_close = self._to_close, []
        for lookup in to_close:
            self._lookup.close_unwanted(lookup)
        for lookup in to_ask:
            self._lookup.ask(lookup)
        self._asked += to_ask
        with self._lock:
            over = [lookup for lookup in self._asked if self._lookup.is_over(lookup)]
            self._looked_up += over
        if over:
            self._asked = [lookup for lookup in self._asked if lookup not in over]
            self._wake()
            for lookup in over:
                self._lookup.close_unwanted(lookup)

    def close(self) -> None:
        """End everything. The loop has stopped; the engine must still be open."""
        self._is_stopping = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._server.stop()
            self._sender.withdraw_all()
            if not self._receiver.quiesce_all(time.monotonic() + _QUIET_SECONDS):
                _logger.error("reads from a peer cannot be stopped; the memory they write to is kept")
                _still_written_to.append((self._regions, self._transport, self._receiver))
                return
        self._transport.close()
