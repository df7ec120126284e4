"""Transfers while everything goes wrong: kills, cuts, losses, delays, duplicates, damage, cancellations.

Whatever happens, each request gets the tokens of one instance, in bounded time, and every block comes back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from executor import ContextPhaseParams, Executor, Request, Response, SamplingConfig
from executor.transfer.local_network import CallFault, Faults, LocalNetwork, ReadFault
from tests.executor.driving import WAIT, finish, request, tokens_of
from tests.transfer.instances import context_only, generation_only, instance, num_free_blocks, wait_until_free

NUM_SCHEDULES = 200
TIMEOUT_MS = 60
"""Short: a loss is only noticed when it has passed."""


@dataclass
class RandomFaults(Faults):
    """Goes by a seed, so that a schedule can be played again. Mild ones are frequent, others rare."""

    seed: int
    rate: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.begin(self.seed, self.rate)

    def begin(self, seed: int, rate: float) -> None:
        """From now on go by this seed."""
        self._random = Random(seed)
        self.rate = rate

    def on_call(self, address: str, method: str) -> CallFault:  # noqa: ARG002
        with self._lock:
            random = self._random
            if random.random() >= self.rate:
                return CallFault()
            kind = random.randrange(4)
            return [
                CallFault(delay=random.uniform(0, 0.2)),
                CallFault(is_lost=True),
                CallFault(is_answer_lost=True),
                CallFault(num_copies=3, delay=random.uniform(0, 0.02)),
            ][kind]

    def on_read(self) -> ReadFault:
        with self._lock:
            random = self._random
            if random.random() >= self.rate:
                return ReadFault()
            kind = random.randrange(5)
            return [
                ReadFault(delay=random.uniform(0, 0.05)),
                ReadFault(fails_after=random.randrange(3)),
                ReadFault(stalls_after=random.randrange(3), linger=random.uniform(0, 0.05)),
                ReadFault(damages=True),
                ReadFault(delay=1.0, linger=random.uniform(0, 0.05)),
            ][kind]


def wanted_requests(random: Random, count: int) -> list[Request]:
    shared = [random.randrange(96) for _ in range(40)]
    made = []
    for _ in range(count):
        prompt = shared[: random.randrange(40)] + [random.randrange(96) for _ in range(1 + random.randrange(30))]
        sampling = SamplingConfig(temperature=1.0, seed=random.randrange(1000)) if random.random() < 0.5 else None
        made.append(request(prompt, 2 + random.randrange(5), sampling_config=sampling or SamplingConfig()))
    return made


@pytest.fixture(scope="module")
def one(tiny_engine_dir: Path) -> object:
    """Tells what the answers are."""
    with instance(tiny_engine_dir, LocalNetwork()) as executor:
        yield executor


class Pair:
    """Two instances that stay for many schedules; a killed one is replaced."""

    def __init__(self, engine_dir: Path) -> None:
        self.faults = RandomFaults(0)
        self.network = LocalNetwork(self.faults)
        self._engine_dir = engine_dir
        self.context = self._open()
        self.generation = self._open()

    def _open(self) -> Executor:
        return instance(self._engine_dir, self.network, timeout_ms=TIMEOUT_MS, max_tokens=400)

    def kill_context(self) -> None:
        """It answers nothing any more, and its memory is gone; then another one takes its place."""
        killed = self.context
        assert killed._transfers is not None
        self.network.kill(killed._transfers.address, killed._transfers.instance_id)
        self.context = self._open()
        killed.shutdown()

    def close(self) -> None:
        self.context.shutdown()
        self.generation.shutdown()


@pytest.fixture(scope="module")
def pair(tiny_engine_dir: Path) -> object:
    made = Pair(tiny_engine_dir)
    yield made
    made.close()


def play(seed: int, one: Executor, pair: Pair) -> None:
    """One schedule: some requests through both instances, with faults, cancellations and perhaps a kill."""
    random = Random(seed)
    requests = wanted_requests(random, 3)
    expected = [tokens_of(finish(one, request_id)) for request_id in one.enqueue_requests(requests)]
    pair.faults.begin(seed, random.choice([0.1, 0.3, 0.6]))

    contexts = [
        finish(pair.context, request_id)[-1].result
        for request_id in pair.context.enqueue_requests([context_only(each) for each in requests])
    ]
    going: list[tuple[int, int]] = []
    for index, (each, result) in enumerate(zip(requests, contexts, strict=True)):
        params = result.context_phase_params
        assert params is not None
        if random.random() < 0.1:
            continue  # its generation never comes
        going.append((index, pair.generation.enqueue_request(generation_only(each, handed_on(params)))))
    cancelled = {id for _, id in going if random.random() < 0.1}
    for request_id in cancelled:
        pair.generation.cancel_request(request_id)
    if random.random() < 0.1:
        pair.kill_context()
    for index, request_id in going:
        got = await_end(pair.generation, request_id)
        if request_id not in cancelled:
            assert tokens_of(got) == expected[index], f"schedule {seed}, request {index}"
    pair.faults.rate = 0.0


def handed_on(params: ContextPhaseParams) -> ContextPhaseParams:
    """As a client that stores it would: through bytes."""
    assert params.opaque_state is not None
    return ContextPhaseParams(list(params.first_gen_tokens), params.req_id, bytes(params.opaque_state))


def await_end(executor: Executor, request_id: int) -> list[Response]:
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        got = executor.await_responses(request_id, WAIT)
        assert got, f"request {request_id} hangs"
        responses += got
    return responses


@pytest.mark.parametrize("begin", range(0, NUM_SCHEDULES, 25))
def test_no_schedule_of_faults_changes_a_token_or_keeps_a_block(begin: int, one: Executor, pair: Pair) -> None:
    for seed in range(begin, begin + 25):
        play(seed, one, pair)
    for executor in (pair.context, pair.generation):
        wait_until_free(executor)
        assert num_free_blocks(executor) == executor.pool_size.num_blocks


def test_the_schedules_met_every_kind_of_failure(pair: Pair) -> None:
    """Runs last: without it the test above might have tried nothing."""
    stats = pair.generation.get_transfer_stats()
    assert stats is not None
    assert {"checksum", "read failed", "timeout", "unreachable"} <= set(stats.recomputed)
    assert stats.num_received > NUM_SCHEDULES
    assert stats.num_quarantined_blocks == 0
