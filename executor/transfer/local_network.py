"""Instances of one process: calls are function calls on another thread, reads are copies. Faults can be put in between.

For one process that runs several instances, and for tests: real bytes move, and whatever can go wrong between machines
can be made to go wrong here, at a chosen moment.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from executor.transfer.methods import METHODS
from executor.transfer.peer import PeerError, TransferService
from executor.transfer.transport import PoolMemory, Read, ReadState, TransportError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallFault:
    """What becomes of one call."""

    delay: float = 0.0
    """Seconds before it arrives."""
    is_lost: bool = False
    """It never arrives."""
    is_answer_lost: bool = False
    """It arrives, its answer does not."""
    num_copies: int = 1
    """So many times it arrives; the first answer counts."""


@dataclass(frozen=True, slots=True)
class ReadFault:
    """What becomes of one read."""

    delay: float = 0.0
    """Seconds that it takes at least."""
    fails_after: int | None = None
    """It fails once so many spans are copied."""
    stalls_after: int | None = None
    """It stops once so many spans are copied, and never ends by itself."""
    linger: float = 0.0
    """Seconds for which it goes on writing after it was cancelled."""
    damages: bool = False
    """A byte is changed on the way."""


class Faults:
    """Decides what goes wrong; this one: nothing. Called on any thread."""

    def on_call(self, address: str, method: str) -> CallFault:  # noqa: ARG002
        return CallFault()

    def on_read(self) -> ReadFault:
        return ReadFault()


class LocalNetwork:
    """Implements `TransferNetwork` for instances that share this object."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._services: dict[str, TransferService] = {}
        self._agents: set[bytes] = set()
        """Instances whose memory is there."""
        self.memory_lock = threading.RLock()
        """Held while bytes are copied: nobody's memory goes away meanwhile."""
        self._threads = ThreadPoolExecutor(8, "local-network")
        self._numbers = itertools.count(1)

    def open_transport(self, instance_id: bytes) -> LocalTransport:
        """See `TransferNetwork.open_transport`."""
        self._agents.add(instance_id)
        return LocalTransport(self, instance_id)

    def serve(self, service: TransferService, listen: str) -> LocalServer:  # noqa: ARG002 — ports are numbers here
        """See `TransferNetwork.serve`."""
        address = f"local:{next(self._numbers)}"
        self._services[address] = service
        return LocalServer(self, address)

    def link(self, address: str) -> LocalLink:
        """See `TransferNetwork.link`."""
        return LocalLink(self, address)

    def kill(self, address: str, instance_id: bytes) -> None:
        """As if the instance's process had ended: it answers nothing, and its memory is gone."""
        self.withdraw_service(address)
        self.withdraw_memory(instance_id)

    def withdraw_service(self, address: str) -> None:
        self._services.pop(address, None)

    def withdraw_memory(self, instance_id: bytes) -> None:
        with self.memory_lock:
            self._agents.discard(instance_id)

    def is_there(self, instance_id: bytes) -> bool:
        return instance_id in self._agents

    def deliver(self, address: str, method: str, request: Message, timeout: float) -> Future[Message]:
        fault = self.faults.on_call(address, method)
        answer: Future[Message] = Future()
        if fault.is_lost:
            threading.Timer(timeout, _give_up, (answer, f"{method} at {address}: no answer")).start()
            return answer
        for _ in range(fault.num_copies):
            self._threads.submit(self._arrive, address, method, request, timeout, fault, answer)
        return answer

    def _arrive(
        self, address: str, method: str, request: Message, timeout: float, fault: CallFault, answer: Future[Message]
    ) -> None:
        if fault.delay:
            time.sleep(fault.delay)
        service = self._services.get(address)
        if service is None:
            _give_up(answer, f"{method} at {address}: nobody is there")
            return
        # As bytes, as between machines: nobody shares objects.
        request_type, response_type = METHODS[method]
        try:
            response = service.answer(method, request_type.FromString(request.SerializeToString()))
        except Exception as error:  # as a server does: the caller gets to know, the server lives on
            _logger.exception("%s at %s failed", method, address)
            _give_up(answer, f"{method} at {address}: {error!r}")
            return
        if fault.is_answer_lost:
            time.sleep(timeout)
            _give_up(answer, f"{method} at {address}: no answer")
        elif fault.delay > timeout:
            _give_up(answer, f"{method} at {address}: too late")
        else:
            with suppress(InvalidStateError):  # another copy was answered before
                answer.set_result(response_type.FromString(response.SerializeToString()))


def _give_up(answer: Future[Message], why: str) -> None:
    with suppress(InvalidStateError):  # another copy was answered before
        answer.set_exception(PeerError(why))


class LocalServer:
    """Implements `ServedAddress`."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self.address = address
        self._network = network

    def stop(self) -> None:
        """See `ServedAddress.stop`."""
        self._network.withdraw_service(self.address)


class LocalLink:
    """Implements `PeerLink`."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self._network = network
        self._address = address

    def call(self, method: str, request: Message, timeout: float, on_done: Callable[[], None]) -> LocalCall:
        """See `PeerLink.call`."""
        future = self._network.deliver(self._address, method, request, timeout)
        future.add_done_callback(lambda _: on_done())
        return LocalCall(future)

    def close(self) -> None:
        """Nothing is open."""


class LocalCall:
    """Implements `PendingCall`."""

    def __init__(self, future: Future[Message]) -> None:
        self._future = future

    def done(self) -> bool:
        """See `PendingCall.done`."""
        return self._future.done()

    def answer(self) -> Any:
        """See `PendingCall.answer`."""
        return self._future.result()


class LocalTransport:
    """Implements `Transport`."""

    name = "local"

    def __init__(self, network: LocalNetwork, instance_id: bytes) -> None:
        self._network = network
        self._instance_id = instance_id
        self._registered: list[NDArray[np.uint8]] = []

    def register(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """See `Transport.register`."""
        self._registered += regions

    def unregister(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """See `Transport.unregister`."""
        gone = {id(region) for region in regions}
        self._registered = [region for region in self._registered if id(region) not in gone]

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        return self._instance_id

    def progress(self) -> None:
        """See `Transport.progress`. Copies need no help."""

    def read(self, source: PoolMemory, spans: NDArray[np.uint64]) -> Read:
        """See `Transport.read`."""
        if not self._network.is_there(source.metadata):
            raise TransportError("the peer is gone")
        return _LocalRead(self._network, source.metadata, spans)

    def close(self) -> None:
        """See `Transport.close`."""
        self._network.withdraw_memory(self._instance_id)
        self._registered.clear()


class _LocalRead:
    """Implements `Read`: some spans are copied at each look."""

    _SPANS_A_LOOK = 64

    def __init__(self, network: LocalNetwork, peer: bytes, spans: NDArray[np.uint64]) -> None:
        self._network = network
        self._peer = peer
        self._spans: list[list[int]] = spans.tolist()
        self._fault = network.faults.on_read()
        self._num_copied = 0
        self._started = time.monotonic()
        self._quiet_at: float | None = None
        self._state = ReadState.IN_PROGRESS

    def poll(self) -> ReadState:
        """See `Read.poll`."""
        if self._state is ReadState.IN_PROGRESS:
            with self._network.memory_lock:
                self._state = self._advance()
        return self._state

    def _advance(self) -> ReadState:
        fault = self._fault
        if not self._network.is_there(self._peer):
            return ReadState.FAILED
        end = min(self._num_copied + self._SPANS_A_LOOK, len(self._spans))
        for limit in (fault.fails_after, fault.stalls_after):
            end = end if limit is None else min(end, limit)
        for there, here, num_bytes in self._spans[self._num_copied : end]:
            ctypes.memmove(here, there, num_bytes)
        self._num_copied = max(end, self._num_copied)
        if fault.fails_after is not None and end >= fault.fails_after:
            return ReadState.FAILED
        if end < len(self._spans) or time.monotonic() < self._started + fault.delay:
            return ReadState.IN_PROGRESS
        if fault.stalls_after is not None:
            return ReadState.IN_PROGRESS
        if fault.damages:
            _, here, num_bytes = self._spans[-1]
            byte = (ctypes.c_uint8 * num_bytes).from_address(here)
            byte[num_bytes // 2] ^= 0x10
        return ReadState.DONE

    def cancel(self) -> bool:
        """See `Read.cancel`. While it lingers it writes what it had to write, again and again."""
        if self._state is not ReadState.IN_PROGRESS:
            return True
        now = time.monotonic()
        if self._quiet_at is None:
            self._quiet_at = now + self._fault.linger
        with self._network.memory_lock:
            if now < self._quiet_at and self._network.is_there(self._peer):
                for there, here, num_bytes in self._spans:
                    ctypes.memmove(here, there, num_bytes)
                return False
        self._state = ReadState.FAILED
        return True
