"""Requests that are offered to a simulation: made one at a time, in order of arrival."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from batch_manager.simulate.errors import SimulationError

FILLER_TOKEN = 0
"""Second to last token of everything made up here: ids up to 256 cost no memory of their own."""
GENERATED_TOKEN = 1
"""What a simulated request generates, unless its workload knows better."""
END_TOKEN = -1
"""Ends a simulated request before its `max_new_tokens`; no vocabulary has it."""
FIRST_CONTENT_TOKEN = 2


class OfferedRequest(NamedTuple):
    """A request before the simulation makes one of it."""

    arrival_time: float
    """Seconds."""
    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    """It generates so many, if nothing ends it before."""
    max_new_tokens: int | None = None
    """What it asks for, at least `num_output_tokens`: what is reserved for it. None: `num_output_tokens`."""
    output_token_ids: Sequence[int] = ()
    """What it generates; `GENERATED_TOKEN` from there on."""
    priority: float = 0.5
    tenant: str = ""
    allotted_time: float | None = None
    cancel_after: float | None = None
    """Seconds after its arrival at which its caller gives up."""
    cache_salt: int | None = None
    adapter_id: int | None = None
    adapter_pages: int = 0


def content(number: int, length: int) -> list[int]:
    """`length` tokens that differ, from the first one on, from those of every other number."""
    tokens = [FILLER_TOKEN] * length
    tokens[0] = FIRST_CONTENT_TOKEN + number
    return tokens


Lengths = Callable[[random.Random], int]


def fixed(length: int) -> Lengths:
    return lambda _source: length


def uniform(low: int, high: int) -> Lengths:
    """From `low` to `high`, both included."""
    return lambda source: source.randint(low, high)


def log_normal(median: float, sigma: float, high: int) -> Lengths:
    """Around `median`, with a long tail cut off at `high`."""
    return lambda source: max(1, min(high, round(median * source.lognormvariate(0.0, sigma))))


def synthetic(
    rate: float,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    *,
    is_poisson: bool = True,
    seed: int = 0,
) -> Iterator[OfferedRequest]:
    """Requests without end, `rate` a second on average, none of which shares a prefix with another.

    Args:
        is_poisson: arrivals are independent of each other; otherwise they are evenly spaced.
    """
    if not rate > 0:
        raise SimulationError(f"rate is {rate} requests a second; it must be above 0")
    source = random.Random(seed)
    now = 0.0
    for number in count():
        now += source.expovariate(rate) if is_poisson else 1.0 / rate
        yield OfferedRequest(now, content(number, prompt_lengths(source)), output_lengths(source))


def take(offered: Iterable[OfferedRequest], num_requests: int) -> Iterator[OfferedRequest]:
    return islice(offered, num_requests)


def faster(offered: Iterable[OfferedRequest], factor: float) -> Iterator[OfferedRequest]:
    """The same requests, `factor` times as many a second."""
    if not factor > 0:
        raise SimulationError(f"the speed-up is {factor}; it must be above 0")
    for request in offered:
        yield request._replace(arrival_time=request.arrival_time / factor)


def with_max_new_tokens(offered: Iterable[OfferedRequest], max_new_tokens: int) -> Iterator[OfferedRequest]:
    """The same requests, each asking for `max_new_tokens`, or for as many as it needs if that is more."""
    for request in offered:
        yield request._replace(max_new_tokens=max(max_new_tokens, request.num_output_tokens))
