"""Peers that end, or stop, in the middle of a read: real processes, real NIXL, pools of hundreds of megabytes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from executor.transfer.bare_instance import BareInstance, BarePool, bare_spec
from executor.transfer.context_state import ContextState
from executor.transfer.grpc_network import GrpcNetwork

pytest.importorskip("nixl_cu12")

SPEC = bare_spec(num_layers=8, num_kv_heads=8, head_size=64, tokens_per_block=32)
NUM_BLOCKS = 240
NUM_TOKENS = 7000
TIMEOUT = 2.0


def run_sender(pipe: multiprocessing.connection.Connection) -> None:
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=TIMEOUT, seed=1)
    while (num_tokens := pipe.recv()) is not None:
        pipe.send(instance.offer(num_tokens).to_bytes())


@contextmanager
def sender() -> Iterator[tuple[multiprocessing.Process, multiprocessing.connection.Connection]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_sender, args=(theirs,))
    process.start()
    try:
        yield process, ours  # type: ignore[misc]
    finally:
        process.kill()
        process.join()


def offered(pipe: multiprocessing.connection.Connection, num_tokens: int = NUM_TOKENS) -> ContextState:
    pipe.send(num_tokens)
    return ContextState.from_bytes(pipe.recv())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_ends_in_the_middle_of_a_read_costs_that_context_only(end: signal.Signals) -> None:
    """Our blocks come back once nothing can write to them, and other peers are read from as before."""
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=TIMEOUT)
    with sender() as (doomed, to_doomed), sender() as (_, to_other):
        assert instance.fetch(offered(to_doomed, 64))[1] is not None
        state = offered(to_doomed)
        assert doomed.pid is not None
        threading.Timer(0.03, os.kill, (doomed.pid, end)).start()
        started = time.monotonic()
        instance.fetch(state)  # whether it came whole before is a matter of luck
        assert time.monotonic() - started < TIMEOUT + 5
        assert instance.fetch(offered(to_other, 200))[1] is not None
        deadline = time.monotonic() + TIMEOUT + 5
        while instance.kv.num_free_blocks < NUM_BLOCKS:
            assert time.monotonic() < deadline, instance.endpoint.stats
            time.sleep(0.01)
    instance.close()


def test_bytes_come_as_they_were_sent() -> None:
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=30.0)
    with sender() as (_, pipe):
        _, blocks = instance.fetch(offered(pipe, 128))
    assert blocks is not None
    received = instance.read(blocks)
    sent = np.concatenate(BarePool(SPEC, NUM_BLOCKS, seed=1).kv_regions(), 1)
    places = [np.flatnonzero((sent[:, :64] == block[:64]).all(1)) for block in received]
    assert all(
        len(place) == 1 and (sent[place[0]] == block).all() for place, block in zip(places, received, strict=True)
    )
    instance.close()
