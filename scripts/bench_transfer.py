"""Contexts from one process to another: bandwidth against NIXL alone, and the time that is not copying.

Two processes on this machine. The sender offers contexts out of a pool with the geometry of SmolLM2-135M in float32;
the receiver fetches them with the code that executors run (Open, reads, checksums, Close), and with nothing but NIXL:
the same spans, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from one_line_parser import OneLineParser

from engine_build.engine_dir import EngineDirectory
from executor import (
    CacheTransceiverConfig,
    ContextPhaseParams,
    Executor,
    ExecutorConfig,
    Request,
    RequestType,
)
from executor.engines.open import engine_spec, kv_cache_dtype
from executor.transfer.background import give_way
from executor.transfer.bare_instance import BareInstance, BarePool, bare_spec
from executor.transfer.context_state import ContextState
from executor.transfer.grpc_network import GrpcNetwork
from executor.transfer.integrity import ModelIdentity
from executor.transfer.nixl_transport import NixlTransport
from executor.transfer.transport import PoolMemory, ReadState, Region, spans_between

TIMEOUT = 30.0
SPEC = bare_spec(num_layers=30, num_kv_heads=3, head_size=64, tokens_per_block=32)
NUM_BLOCKS = 300
HELP_NIXL = 0
"""Instead of a number of tokens: NIXL alone is reading now."""


def run_sender(pipe: multiprocessing.connection.Connection) -> None:
    """The other process: offers what it is asked for, until it is told to stop."""
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=TIMEOUT, seed=1)
    transport = NixlTransport("bench-sender")
    regions = instance.pool.kv_regions()
    transport.register(regions)
    pipe.send(PoolMemory(transport.name, transport.metadata(), tuple(map(Region.of, regions))))
    while (num_tokens := pipe.recv()) is not None:
        if num_tokens == HELP_NIXL:
            while not pipe.poll():
                transport.progress()
        else:
            pipe.send(instance.offer(num_tokens).to_bytes())
    instance.close()
    transport.close()


def read_alone(transport: NixlTransport, memory: PoolMemory, spans: NDArray[np.uint64]) -> float:
    """Seconds of one read with NIXL and nothing else."""
    started = time.perf_counter()
    read = transport.read(memory, spans)
    while (state := read.poll()) is ReadState.IN_PROGRESS:
        pass
    assert state is ReadState.DONE
    return time.perf_counter() - started


def compare(num_tokens: int, rounds: int) -> dict[str, float]:
    """Our transfer and NIXL alone, in turns, of contexts of one length."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_sender, args=(theirs,))
    process.start()
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=TIMEOUT)
    memory: PoolMemory = ours.recv()
    alone = NixlTransport("bench-receiver")
    regions = BarePool(SPEC, NUM_BLOCKS).kv_regions()
    alone.register(regions)
    num_blocks = -(-num_tokens // SPEC.tokens_per_block)
    num_bytes = num_blocks * SPEC.kv_bytes_per_block
    block_ids = range(num_blocks)
    spans = spans_between(memory.regions, block_ids, [Region.of(region) for region in regions], block_ids)
    whole, raw = [], []
    thread = ThreadPoolExecutor(1, initializer=give_way)  # of the priority that transfers have
    for turn in range(rounds + 1):
        ours.send(num_tokens)
        state = ContextState.from_bytes(ours.recv())
        time.sleep(0.02 + num_bytes / 4e9)  # meanwhile the sender computes its checksums, as while a client hands on
        seconds, blocks = instance.fetch(state)
        assert blocks is not None, instance.endpoint.stats
        ours.send(HELP_NIXL)
        seconds_alone = thread.submit(read_alone, alone, memory, spans).result()
        if turn:  # the first one connects
            whole.append(seconds)
            raw.append(seconds_alone)
    ours.send(None)
    process.join()
    instance.close()
    thread.shutdown()
    alone.close()
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


def run_context_sender(pipe: multiprocessing.connection.Connection, engine_dir: Path, num_tokens: int) -> None:
    """The other process of `interference`: contexts of an engine's model that nobody has computed."""
    directory = EngineDirectory.open(engine_dir)
    spec = engine_spec(directory)
    num_blocks = 2 * -(-num_tokens // spec.tokens_per_block)
    instance = BareInstance(
        GrpcNetwork(),
        spec,
        num_blocks,
        timeout=TIMEOUT,
        identity=ModelIdentity.of(directory),
        kv_dtype=kv_cache_dtype(directory),
    )
    while (salt := pipe.recv()) is not None:
        pipe.send(instance.offer(num_tokens, salt).to_bytes())
    instance.close()


def interference(engine_dir: Path, num_gaps: int) -> dict[str, float]:
    """Time between tokens of a request that decodes, while long contexts arrive, and while none does.

    An arriving request takes one step over its long context. So does, in the phases without arrivals, one that finds
    the same context in the cache: what is left is what the arrival costs.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    transceiver = CacheTransceiverConfig(kv_transfer_timeout_ms=int(TIMEOUT * 1000))
    with Executor(engine_dir, ExecutorConfig(cache_transceiver_config=transceiver)) as executor:
        num_tokens = min(4096, executor.spec.max_input_len, executor.spec.max_seq_len - 2)
        process = spawn.Process(target=run_context_sender, args=(theirs, engine_dir, num_tokens))
        process.start()
        salts = itertools.count(1)

        def arrive(salt: int) -> None:
            ours.send(salt)
            params = ContextPhaseParams([1], 1, ours.recv())
            kind = RequestType.REQUEST_TYPE_GENERATION_ONLY
            run(Request([1] * num_tokens, 2, type=kind, context_phase_params=params, cache_salt_id=salt))

        def run(request: Request) -> None:
            executor.await_responses(executor.enqueue_request(request))

        arrive(cached := next(salts))
        times: list[float] = []
        decoding = Request([1] * 8, executor.spec.max_seq_len - 8, streaming=True)
        request_id = executor.enqueue_request(decoding, listener=lambda _: times.append(time.perf_counter()))
        gaps: dict[bool, list[float]] = {False: [], True: []}
        num_arrived = 0
        while min(map(len, gaps.values())) < num_gaps:
            for has_arrivals in gaps:
                begin, until = len(times), time.perf_counter() + 2
                while (now := time.perf_counter()) < until:
                    if has_arrivals:
                        arrive(next(salts))
                        num_arrived += 1
                    else:
                        run(Request([1] * num_tokens, 1, cache_salt_id=cached))
                    time.sleep(max(0.0, now + 0.5 - time.perf_counter()))
                gaps[has_arrivals] += np.diff(times[begin:]).tolist()
        executor.cancel_request(request_id)
        stats = executor.get_transfer_stats()
        assert stats is not None
        assert not stats.recomputed, stats
        ours.send(None)
        process.join()
    quiet, busy = (1000 * float(np.percentile(gaps[each], 99)) for each in (False, True))
    return {"num_tokens": num_tokens, "contexts": num_arrived, "p99_ms": quiet, "p99_ms_arriving": busy}


def main() -> None:
    parser = OneLineParser(
        prog="scripts/bench_transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--engine_dir", type=Path, help="also measure what decoding on this engine feels of arrivals")
    arguments = parser.parse_args()
    rounds = 8 if arguments.quick else 30
    large = compare(4096, rounds)
    small = compare(32, 3 * rounds)
    for result in (small, large):
        print(
            f"{result['num_tokens']:5.0f} tokens, {result['megabytes']:6.1f} MB in {result['num_spans']:.0f} spans: "
            f"{result['transfer_ms']:.2f} ms, {result['gigabytes_per_second']:.2f} GB/s; "
            f"NIXL alone {result['nixl_ms']:.2f} ms, {result['nixl_gigabytes_per_second']:.2f} GB/s"
        )
    ratio = large["gigabytes_per_second"] / large["nixl_gigabytes_per_second"]
    print(f"bandwidth {ratio:.2f} of NIXL alone; {small['overhead_ms']:.2f} ms more than the copy of one block")
    figures: dict[str, object] = {
        "ratio_vs_nixl": ratio,
        "overhead_ms": small["overhead_ms"],
        "large": large,
        "small": small,
    }
    if arguments.engine_dir is not None:
        felt = interference(arguments.engine_dir, 100 if arguments.quick else 600)
        figures |= {"itl_p99_ratio": felt["p99_ms_arriving"] / felt["p99_ms"], "interference": felt}
        print(
            f"between tokens, p99: {felt['p99_ms_arriving']:.1f} ms while contexts of {felt['num_tokens']:.0f} tokens "
            f"arrive, {felt['p99_ms']:.1f} ms while none does: {figures['itl_p99_ratio']:.2f}"
        )
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
