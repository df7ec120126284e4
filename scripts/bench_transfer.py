"""Contexts from one process to another: bandwidth against NIXL alone, time beyond the copy, and what decoding feels of it.

Two processes on this machine. The sender offers contexts out of a pool with the geometry of SmolLM2-135M in float32 (or of a
given one); the receiver fetches them with the code that executors run (Open, reads, checksums, Close), and with nothing but
NIXL: the same spans, in turns.

The last part decodes on a real engine while contexts of 4,096 tokens arrive, and while none does, in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batch_manager import BatchManager, BatchManagerConfig, KvCacheManager, Request
from batch_manager.kv import KvCacheConfig
from executor.engines.interface import EngineSpec
from executor.transfer.context_state import ContextState
from executor.transfer.endpoint import TransferEndpoint
from executor.transfer.grpc_network import GrpcNetwork
from executor.transfer.integrity import ModelIdentity, prompt_digest
from executor.transfer.nixl_transport import NixlTransport
from executor.transfer.transport import PoolMemory, ReadState, spans_between

TIMEOUT = 30.0
IDENTITY = ModelIdentity(b"c" * 32, b"w" * 32, "float32")


@dataclass(frozen=True)
class Geometry:
    """What a block is."""

    num_layers: int = 30
    num_kv_heads: int = 3
    head_size: int = 64
    tokens_per_block: int = 32
    num_blocks: int = 300

    @property
    def spec(self) -> EngineSpec:
        bytes_per_block = 2 * self.num_layers * self.num_kv_heads * self.head_size * self.tokens_per_block * 4
        return EngineSpec(
            100, self.num_layers, self.num_kv_heads, self.head_size, self.tokens_per_block, 4, 8192, 8192, 8192,
            bytes_per_block,
        )  # fmt: skip


class PoolOnly:
    """An engine that has a pool and computes nothing."""

    def __init__(self, geometry: Geometry) -> None:
        self.spec = geometry.spec
        self.num_blocks = geometry.num_blocks
        size = self.spec.kv_bytes_per_block // (2 * geometry.num_layers)
        random = np.random.default_rng(1)
        self._regions = [
            random.integers(0, 256, (geometry.num_blocks, size), np.uint8) for _ in range(2 * geometry.num_layers)
        ]

    def kv_regions(self) -> list[NDArray[np.uint8]]:
        return self._regions


class Instance:
    """An endpoint without a loop: requests are taken in and let go by hand."""

    def __init__(self, engine: Any, identity: ModelIdentity, kv_dtype: str) -> None:
        spec = engine.spec
        self.kv = KvCacheManager(
            KvCacheConfig(
                num_blocks=engine.num_blocks, tokens_per_block=spec.tokens_per_block, enable_block_reuse=False
            )
        )
        self.manager = BatchManager(BatchManagerConfig(max_batch_size=4, max_num_tokens=8192), self.kv)
        self.lock = threading.Condition()
        self.woken = threading.Event()
        self.endpoint = TransferEndpoint(
            GrpcNetwork(), "127.0.0.1:0", engine, identity, kv_dtype, self.kv, self.manager, TIMEOUT
        )
        self.endpoint.start(self.lock, self.woken.set)
        self._next_id = 1

    def offer(self, num_tokens: int) -> bytes:
        """A context of so many tokens, as if it had just been computed."""
        with self.lock:
            request = Request(self._next_id, [1] * num_tokens, 1)
            self._next_id += 1
            self.manager.add_request(request)
            self.endpoint.expect_context_only(request)
            progress = []
            while not progress:
                plan = self.manager.schedule()
                self.endpoint.keep(plan)
                progress = self.manager.update(plan, [[1] if entry.samples else [] for entry in plan.scheduled])
                digest = prompt_digest(request.token_ids[:num_tokens], None)
                offered = self.endpoint.offer(lambda _, digest=digest: digest)  # type: ignore[misc]
        return self.endpoint.context_state(offered[request.request_id], num_tokens, digest, []).to_bytes()

    def fetch(self, state: ContextState) -> tuple[float, list[int]]:
        """Seconds until a context is here and may be used, and its blocks."""
        request = Request(
            self._next_id, [1] * state.num_tokens, 8, generated_token_ids=[1], num_remote_tokens=state.num_tokens
        )
        self._next_id += 1
        started = time.perf_counter()
        with self.lock:
            self.manager.add_request(request)
            self.endpoint.expect_generation_only(request, state)
            self.manager.schedule()
            self.endpoint.begin()
            block_ids = list(request.block_ids)
        while True:
            self.woken.wait(TIMEOUT)
            self.woken.clear()
            with self.lock:
                if self.endpoint.settle():
                    break
        seconds = time.perf_counter() - started
        assert request.num_computed_tokens == state.num_tokens, self.endpoint.stats
        with self.lock:
            self.manager.cancel_request(request.request_id)
            self.endpoint.forget(request.request_id)
        return seconds, block_ids


def run_sender(pipe: multiprocessing.connection.Connection, geometry: Geometry, identity: ModelIdentity) -> None:
    """The other process: offers what it is asked for, until it is told to stop."""
    instance = Instance(PoolOnly(geometry), identity, "float32")
    memory = instance.endpoint._memory
    pipe.send((memory.transport, memory.metadata, memory.regions))
    while (num_tokens := pipe.recv()) is not None:
        if num_tokens == 0:  # NIXL alone is reading: help as long as nothing is asked
            while not pipe.poll():
                instance.endpoint._transport.progress()
        else:
            pipe.send(instance.offer(num_tokens))
    instance.endpoint.close()


def read_alone(transport: NixlTransport, memory: PoolMemory, spans: NDArray[np.uint64]) -> float:
    """Seconds of one read with NIXL and nothing else."""
    started = time.perf_counter()
    read = transport.read(memory, spans)
    while (state := read.poll()) is ReadState.IN_PROGRESS:
        pass
    assert state is ReadState.DONE
    return time.perf_counter() - started


def compare(geometry: Geometry, num_tokens: int, rounds: int) -> dict[str, float]:
    """Our transfer and NIXL alone, in turns, of contexts of one length."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_sender, args=(theirs, geometry, IDENTITY))
    process.start()
    instance = Instance(PoolOnly(geometry), IDENTITY, "float32")
    memory = PoolMemory(*ours.recv())
    alone = NixlTransport("alone")
    pool = PoolOnly(geometry)
    alone.register(pool.kv_regions())
    regions = tuple(type(memory.regions[0]).of(region) for region in pool.kv_regions())
    num_blocks = -(-num_tokens // geometry.tokens_per_block)
    block_ids = list(range(num_blocks))
    spans = spans_between(memory.regions, block_ids, regions, block_ids)
    whole, raw = [], []
    for turn in range(rounds + 1):
        ours.send(num_tokens)
        state = ContextState.from_bytes(ours.recv())
        time.sleep(0.02 + num_blocks * geometry.spec.kv_bytes_per_block / 4e9)  # the sender's checksums are computed
        seconds, _ = instance.fetch(state)
        ours.send(0)
        seconds_alone = read_alone(alone, memory, spans)
        if turn:  # the first one connects
            whole.append(seconds)
            raw.append(seconds_alone)
    ours.send(None)
    process.join()
    instance.endpoint.close()
    alone.close()
    num_bytes = num_blocks * geometry.spec.kv_bytes_per_block
    return {
        "num_tokens": num_tokens,
        "megabytes": num_bytes / 1e6,
        "num_spans": len(spans),
        "transfer_ms": 1000 * statistics.median(whole),
        "nixl_ms": 1000 * statistics.median(raw),
        "overhead_ms": 1000 * statistics.median(np.subtract(whole, raw).tolist()),
        "gigabytes_per_second": num_bytes / 1e9 / statistics.median(whole),
        "nixl_gigabytes_per_second": num_bytes / 1e9 / statistics.median(raw),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    rounds = 8 if arguments.quick else 30
    geometry = Geometry()
    large = compare(geometry, 4096, rounds)
    small = compare(geometry, 32, 3 * rounds)
    for result in (small, large):
        print(
            f"{result['num_tokens']:5.0f} tokens, {result['megabytes']:6.1f} MB in {result['num_spans']:.0f} spans: "
            f"{result['transfer_ms']:.2f} ms, {result['gigabytes_per_second']:.2f} GB/s; "
            f"NIXL alone {result['nixl_ms']:.2f} ms, {result['nixl_gigabytes_per_second']:.2f} GB/s"
        )
    ratio = large["gigabytes_per_second"] / large["nixl_gigabytes_per_second"]
    print(f"bandwidth {ratio:.2f} of NIXL alone; {small['overhead_ms']:.2f} ms more than the copy of one block")
    if arguments.json:
        print(json.dumps({"ratio_vs_nixl": ratio, "overhead_ms": small["overhead_ms"], "large": large, "small": small}))


if __name__ == "__main__":
    main()
