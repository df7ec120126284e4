"""NIXL as the transport: UCX underneath, so shared memory within a machine, TCP or RDMA between machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.api.errors import UnsupportedFeatureError
from executor.transfer.transport import PoolMemory, Read, ReadState, TransportError

_STATES = {"DONE": ReadState.DONE, "PROC": ReadState.IN_PROGRESS, "ERR": ReadState.FAILED}


def check_nixl() -> None:
    """Raises `UnsupportedFeatureError` where NIXL is not installed."""
    if find_spec("nixl_cu12") is None:
        raise UnsupportedFeatureError("cache_transceiver_config needs NIXL: pip install 'inflight-executor[nixl]'")


class NixlTransport:
    """Implements `Transport`. Not thread-safe, as NIXL's agent is not: one thread makes all calls."""

    name = "nixl"

    def __init__(self, agent_name: str) -> None:
        """Start an agent.

        Args:
            agent_name: unique among all instances that ever meet.

        Raises:
            UnsupportedFeatureError: NIXL is not installed.
        """
        check_nixl()
        from nixl_cu12 import _bindings
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        errors = [each for each in vars(_bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
        self.errors: tuple[type[Exception], ...] = tuple(errors)
        """What NIXL raises: its exceptions have no base of their own."""
        nixl_logger = logging.getLogger("nixl")
        nixl_logger.handlers.clear()  # it writes to standard output, which is not a library's
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)
        # No progress thread: one that has nothing to do takes a whole core.
        self._agent: Any = nixl_agent(agent_name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._registered: dict[int, Any] = {}
        """NIXL's descriptors by the address of the memory."""
        self._peers: dict[bytes, str] = {}
        """Agents by the metadata they were added with."""

    def register(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """See `Transport.register`."""
        for region in regions:
            address = region.ctypes.data
            self._registered[address] = self._agent.register_memory([(address, region.nbytes, 0, "")], "DRAM")

    def unregister(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        """See `Transport.unregister`."""
        for region in regions:
            self._agent.deregister_memory(self._registered.pop(region.ctypes.data))

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def progress(self) -> None:
        """See `Transport.progress`."""
        self._agent.get_new_notifs()

    def read(self, source: PoolMemory, spans: NDArray[np.uint64]) -> Read:
        """See `Transport.read`."""
        device = np.zeros(len(spans), np.uint64)
        here = np.stack([spans[:, 1], spans[:, 2], device], 1)
        there = np.stack([spans[:, 0], spans[:, 2], device], 1)
        agent = self._agent
        handle = None
        try:
            peer = self._peers.get(source.metadata)
            if peer is None:
                peer = self._peers[source.metadata] = agent.add_remote_agent(source.metadata)
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer
            )
            state = _STATES[agent.transfer(handle)]
        except self.errors as error:
            self._forget(source.metadata)
            raise TransportError(f"NIXL cannot read from the peer: {error!r}") from error
        return _NixlRead(self, handle, state, source.metadata)

    def _forget(self, metadata: bytes) -> None:
        """A peer failed: meet it anew if it is heard of again."""
        peer = self._peers.pop(metadata, None)
        if peer is not None:
            with suppress(*self.errors):  # a connection that is gone already is what is wanted
                self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        """Forget peers and memory; reads must have ended."""
        for metadata in list(self._peers):
            self._forget(metadata)
        for descriptors in self._registered.values():
            self._agent.deregister_memory(descriptors)
        self._registered.clear()


class _NixlRead:
    """Implements `Read`."""

    def __init__(self, transport: NixlTransport, handle: Any, state: ReadState, metadata: bytes) -> None:
        self._transport = transport
        self._handle = handle
        self._state = state
        self._metadata = metadata
        if state is not ReadState.IN_PROGRESS:
            self._end(state)

    def poll(self) -> ReadState:
        """See `Read.poll`."""
        if self._state is ReadState.IN_PROGRESS:
            try:
                state = _STATES[self._transport._agent.check_xfer_state(self._handle)]
            except self._transport.errors:  # the peer is gone, and the read with it
                state = ReadState.FAILED
            if state is not ReadState.IN_PROGRESS:
                self._end(state)
        return self._state

    def cancel(self) -> bool:
        """See `Read.cancel`. NIXL releases a handle only once nothing uses it any more."""
        if self.poll() is not ReadState.IN_PROGRESS:
            return True
        try:
            self._transport._agent.release_xfer_handle(self._handle)
        except self._transport.errors:  # it cannot be stopped yet
            return False
        self._state = ReadState.FAILED
        return True

    def _end(self, state: ReadState) -> None:
        self._state = state
        self._transport._agent.release_xfer_handle(self._handle)
        if state is ReadState.FAILED:
            self._transport._forget(self._metadata)
