"""A request whose context one instance computes and whose generation another: the same answer as from one instance."""

from __future__ import annotations

import numpy as np
import pytest

from executor import (
    ContextPhaseParams,
    Result,
    SamplingConfig,
)
from tests.executor.driving import finish, request, tokens_of
from tests.transfer.instances import (
    OpenInstance,
    context_only,
    generation_only,
    wait_until_free,
)

VOCAB = 96


def prompts(seed: int, count: int, longest: int = 90) -> list[list[int]]:
    """Half of them share beginnings."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCAB, longest).tolist()
    made = []
    for index in range(count):
        length = int(random.integers(1, longest))
        own = random.integers(0, VOCAB, length).tolist()
        made.append(shared[: length // 2] + own[length // 2 :] if index % 2 else own)
    return made


SAMPLING = [
    SamplingConfig(),
    SamplingConfig(temperature=0.9, seed=7),
    SamplingConfig(temperature=1.1, seed=8, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingConfig(temperature=1.0, seed=9, top_p=0.9, top_p_decay=0.95, no_repeat_ngram_size=3, min_tokens=4),
]


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no_reuse"])
def test_two_hundred_requests_get_the_tokens_of_one_instance_in_both_role_orders(
    open_instance: OpenInstance, reuse: bool
) -> None:
    one = open_instance(reuse=reuse)
    first, second = open_instance(reuse=reuse), open_instance(reuse=reuse)
    wanted = [
        request(prompt, 2 + index % 9, sampling_config=SAMPLING[index % 4])
        for index, prompt in enumerate(prompts(1, 200))
    ]
    expected = [tokens_of(finish(one, request_id)) for request_id in one.enqueue_requests(wanted)]
    got = []
    for begin in range(0, 200, 25):
        context, generation = (first, second) if begin < 100 else (second, first)
        some = wanted[begin : begin + 25]
        contexts = [
            finish(context, request_id)[0].result
            for request_id in context.enqueue_requests([context_only(each) for each in some])
        ]
        requests = [generation_only(each, params_of(result)) for each, result in zip(some, contexts, strict=True)]
        got += [tokens_of(finish(generation, request_id)) for request_id in generation.enqueue_requests(requests)]
    assert got == expected
    for executor in (first, second):
        stats = executor.get_transfer_stats()
        assert stats is not None
        assert (stats.num_offered, stats.num_sent, stats.num_expired) == (100, 100, 0)
        assert not stats.recomputed
        wait_until_free(executor)


def params_of(result: Result) -> ContextPhaseParams:
    assert result.context_phase_params is not None
    return result.context_phase_params
