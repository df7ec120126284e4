"""The 64-request mix that the throughput benchmarks share; standard library only, so that any peer can read it."""

from __future__ import annotations

import random
from typing import NamedTuple


class Workload(NamedTuple):
    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def mixed_requests(count: int = 64, seed: int = 0) -> Workload:
    """`count` prompts of 32 to 256 random tokens, each with 32 to 128 tokens to generate, end id ignored.

    With 64: 8,864 prompt tokens and 5,058 generated ones.
    """
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        length = source.randint(32, 256)
        prompts.append([source.randrange(100, 40000) for _ in range(length)])
    return Workload(prompts, [source.randint(32, 128) for _ in range(count)])
