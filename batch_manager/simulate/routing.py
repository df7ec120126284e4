"""Which instance gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from batch_manager.request import Request


class RouterPolicy(StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    KV_AWARE = "kv_aware"


class Candidate(Protocol):
    """What a router knows of an instance."""

    @property
    def num_requests(self) -> int:
        """Sent there and not ended."""
        ...

    @property
    def num_pending_tokens(self) -> int:
        """Of these, prompt tokens to compute of those that have no token yet, as it seemed when they were sent."""
        ...

    @property
    def num_active_tokens(self) -> int:
        """Of these, tokens they had when they were sent: what they hold in the cache."""
        ...

    def num_cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request that are in its cache."""
        ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class Router(Protocol):
    def choose(self, request: Request, candidates: Sequence[AnyCandidate]) -> AnyCandidate:
        """One of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: Request, candidates: Sequence[AnyCandidate]) -> AnyCandidate:  # noqa: ARG002
        chosen = candidates[self._num_chosen % len(candidates)]
        self._num_chosen += 1
        return chosen


class LeastLoaded:
    """The one with the fewest requests; of equals the first."""

    def choose(self, request: Request, candidates: Sequence[AnyCandidate]) -> AnyCandidate:  # noqa: ARG002
        return min(candidates, key=lambda candidate: candidate.num_requests)


class KvAware:
    """The one where the least is to be done and held: tokens to compute before and for this request, and tokens held.

    The cost of NVIDIA Dynamo's KV router, with exact knowledge of the caches where that has events. Equal costs: the
    one with the fewest requests.
    """

    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._overlap_weight = overlap_weight
        """What a token to compute counts, compared with one that is held."""

    def choose(self, request: Request, candidates: Sequence[AnyCandidate]) -> AnyCandidate:
        def cost(candidate: AnyCandidate) -> tuple[float, int]:
            missing = len(request.token_ids) - candidate.num_cached_tokens(request)
            to_compute = candidate.num_pending_tokens + missing
            return self._overlap_weight * to_compute + candidate.num_active_tokens, candidate.num_requests

        return min(candidates, key=cost)


def make_router(policy: RouterPolicy) -> Router:
    match policy:
        case RouterPolicy.ROUND_ROBIN:
            return RoundRobin()
        case RouterPolicy.LEAST_LOADED:
            return LeastLoaded()
        case RouterPolicy.KV_AWARE:
            return KvAware()
