"""The KV block manager alone: admission, storing and release for each prompt token, decode for each sequence."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.table import Table

from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.request import Request

TOKENS_PER_BLOCK = 16
NUM_PROMPTS = 64
PROMPT_LENGTH = 2004
VOCABULARY = 50_000
BLOCKS_FOR_ALL = NUM_PROMPTS * (PROMPT_LENGTH // TOKENS_PER_BLOCK + 2)
DECODE_STEPS = 10
"""No more than what is left in a prompt's last block, so that no step needs a new one."""
DECODE_LENGTHS = range(PROMPT_LENGTH + 1, PROMPT_LENGTH + DECODE_STEPS + 1)

Costs = dict[str, float]
Item = TypeVar("Item")


def prompts(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(number, [rng.randrange(VOCABULARY) for _ in range(PROMPT_LENGTH)], DECODE_STEPS)
        for number in range(NUM_PROMPTS)
    ]


def seconds(work: Callable[[Item], object], items: Iterable[Item]) -> float:
    """Time for all of `items`, without the garbage collector's."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for item in items:
        work(item)
    elapsed = time.perf_counter() - started
    gc.enable()
    return elapsed


def decode(kv: KvCacheManager, requests: list[Request], length: int) -> None:
    """A step of all sequences that needs no new block."""
    for request in requests:
        kv.allocate(request, length)
        kv.store(request, length)


def run(kv: KvCacheManager, requests: list[Request]) -> Costs:
    """One pass of all requests through the manager; seconds by part."""

    def admit(request: Request) -> None:
        reuse = kv.find_reuse(request)
        kv.num_new_blocks(request, PROMPT_LENGTH, reuse)
        assert kv.allocate(request, PROMPT_LENGTH, reuse) is not None

    costs = {
        "match": seconds(kv.find_reuse, requests),
        "admit": seconds(admit, requests),
        "store": seconds(lambda request: kv.store(request, PROMPT_LENGTH), requests),
    }
    for request in requests:
        request.token_ids += [0] * DECODE_STEPS
    costs["decode"] = seconds(lambda length: decode(kv, requests, length), DECODE_LENGTHS)
    costs["release"] = seconds(kv.release, requests)
    for request in requests:
        del request.token_ids[PROMPT_LENGTH:]
    return costs


def best(rounds: list[Costs]) -> Costs:
    """The least disturbed of several rounds, part by part."""
    return {part: min(costs[part] for costs in rounds) for part in rounds[0]}


def measure(repeats: int, *, events: bool = False) -> dict[str, Costs]:
    """For each case: ns for each token (match, admit, store, release), us for each sequence of a decode step."""
    measured: dict[str, list[Costs]] = {case: [] for case in ("cold", "cached", "evicting")}
    for seed in range(repeats):
        kv = KvCacheManager(
            KvCacheConfig(BLOCKS_FOR_ALL, TOKENS_PER_BLOCK, event_buffer_max_size=100_000 if events else 0)
        )
        requests = prompts(seed)
        measured["cold"].append(run(kv, requests))
        measured["cached"].append(run(kv, requests))
        measured["evicting"].append(run(kv, prompts(seed + repeats)))
    result = {}
    for case, rounds in measured.items():
        costs = best(rounds)
        tokens = NUM_PROMPTS * PROMPT_LENGTH
        per_token = {part: costs[part] / tokens * 1e9 for part in ("match", "admit", "store", "release")}
        per_sequence = costs["decode"] / NUM_PROMPTS / DECODE_STEPS * 1e6
        result[case] = {**per_token, "ns_per_token": per_token["admit"], "us_per_decode_seq": per_sequence}
    return result


def costs_table(result: dict[str, Costs]) -> Table:
    table = Table("", "match", "match + allocate", "store", "release", "decode, us / sequence", title="ns / token")
    for case, costs in result.items():
        parts = [f"{costs[part]:.0f}" for part in ("match", "admit", "store", "release")]
        table.add_row(case, *parts, f"{costs['us_per_decode_seq']:.2f}")
    return table


def worst(result: dict[str, Costs]) -> Costs:
    return {key: max(case[key] for case in result.values()) for key in ("ns_per_token", "us_per_decode_seq")}
