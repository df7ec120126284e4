"""What a receiver says to peers so that they keep contexts for it, and no longer than needed: Heartbeat and Close."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from executor.transfer.context_state import ContextState
from executor.transfer.peer import PeerError, PeerLink, PendingCall
from protos.inflight.v1 import transfer_pb2 as pb

_logger = logging.getLogger(__name__)

_HEARTBEATS_A_LEASE = 3
"""So many heartbeats are sent while a lease would last: two may be lost."""

_CLOSE_ATTEMPTS = 3
"""A lost Close costs the sender its blocks until the lease ends, so it is worth saying again; it is idempotent."""


class _Closing(NamedTuple):
    call: PendingCall
    address: str
    request: pb.CloseRequest
    attempt: int
    """From 1."""


class LeaseUpkeep:
    """Nothing here waits: calls are sent, and `follow` looks at what became of them. One thread makes all calls."""

    def __init__(self, link_to: Callable[[str], PeerLink], timeout: float, on_news: Callable[[], None]) -> None:
        """Begin.

        Args:
            link_to: the way to a peer, by its address.
            timeout: seconds that a peer keeps a context after the last word about it.
            on_news: called, on any thread, when `follow` has something to do.
        """
        self._link_to = link_to
        self._timeout = timeout
        self._on_news = on_news
        self._closing: list[_Closing] = []
        self._heartbeats: list[tuple[PendingCall, bytes]] = []
        """With the instance that was asked."""
        self.next_heartbeat = 0.0
        """`time.monotonic()` when `beat` will send some again."""

    def close(self, context: ContextState, outcome: pb.CloseOutcome) -> None:
        """The context is not needed any more."""
        request = pb.CloseRequest(
            instance_id=context.instance_id, context_id=context.context_id, num_ranks=1, outcome=outcome
        )
        self._send_close(context.address, request, 1)

    def beat(self, contexts: Sequence[ContextState], now: float) -> None:
        """Say of all contexts that are awaited or being read that they are, where the time has come."""
        if now < self.next_heartbeat:
            return
        timeout = self._timeout / _HEARTBEATS_A_LEASE
        self.next_heartbeat = now + timeout
        by_peer: dict[tuple[str, bytes], list[int]] = defaultdict(list)
        for context in contexts:
            by_peer[context.address, context.instance_id].append(context.context_id)
        for (address, instance_id), context_ids in by_peer.items():
            request = pb.HeartbeatRequest(instance_id=instance_id, context_ids=context_ids)
            call = self._link_to(address).call("Heartbeat", request, timeout, self._on_news)
            self._heartbeats.append((call, instance_id))

    def follow(self) -> set[tuple[bytes, int]]:
        """Look at what has been answered, and say again what was lost.

        Returns:
            The (instance, context) pairs whose lease has ended, as their peers say.
        """
        closing, self._closing = self._closing, []
        for each in closing:
            if not each.call.done():
                self._closing.append(each)
                continue
            try:
                each.call.answer()
            except PeerError as error:
                if each.attempt < _CLOSE_ATTEMPTS:
                    self._send_close(each.address, each.request, each.attempt + 1)
                else:
                    _logger.info("the peer does not hear that a context is closed: %s", error)
        ended: set[tuple[bytes, int]] = set()
        heartbeats, self._heartbeats = self._heartbeats, []
        for call, instance_id in heartbeats:
            if not call.done():
                self._heartbeats.append((call, instance_id))
                continue
            try:
                answer: pb.HeartbeatResponse = call.answer()
            except PeerError:
                continue  # the next one may get through; if none does, Open will say so
            ended.update((instance_id, context_id) for context_id in answer.ended_context_ids)
        return ended

    def _send_close(self, address: str, request: pb.CloseRequest, attempt: int) -> None:
        call = self._link_to(address).call("Close", request, self._timeout / _CLOSE_ATTEMPTS, self._on_news)
        self._closing.append(_Closing(call, address, request, attempt))
