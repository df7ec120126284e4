"""Why a request waits: a code and the numbers behind it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitCode(StrEnum):
    """What a waiting or paused request waits for."""

    NEXT_ITERATION = "next_iteration"
    """It has not been looked at since it arrived or was woken."""
    KV_RESERVATION = "kv_reservation"
    """Blocks to run to completion (`GUARANTEED_NO_EVICT`, `STATIC_BATCH`, or paused often)."""
    KV_CAPACITY = "kv_capacity"
    """Blocks for its context (`MAX_UTILIZATION`)."""
    PAUSE_HEADROOM = "pause_headroom"
    """Blocks are free, but kept for the growth of what runs, since requests had to be paused lately."""
    TOKEN_BUDGET = "token_budget"
    """Query rows in this iteration."""
    BATCH_SIZE = "batch_size"
    """Sequences in this iteration, or requests that may hold blocks."""
    BEAM_WIDTH = "beam_width"
    """An iteration of its beam width."""
    STATIC_BATCH = "static_batch"
    """The end of the running batch."""
    PREFIX_DEFERRED = "prefix_deferred"
    """Another request is computing the first block it would compute."""
    ADAPTER_PAGES = "adapter_pages"
    """Pages for its adapter."""
    FAIR_SHARE = "fair_share"
    """Its tenant has been served more than the tenant that is first in line."""
    KV_LOADING = "kv_loading"
    """Blocks found in a lower tier of the cache (host, disk)."""
    REMOTE_KV = "remote_kv"
    """Blocks that another instance sends."""
    GRAMMAR = "grammar"
    """A grammar that is being compiled."""
    PAUSED_BY_OPERATOR = "paused_by_operator"
    DRAINING = "draining"


class WaitReason(NamedTuple):
    """Why a request waits.

    `needed` and `available` are blocks, tokens, sequences, pages or tokens per weight, as the code says.
    """

    code: WaitCode
    needed: int
    available: int
    holders: tuple[int, ...] = ()
    """Ids of requests that hold what is missing, those that hold the most first, at most eight."""
    behind: int | None = None
    """Id of the request that is first in line and to which code and numbers belong, if it is another one."""

    def __str__(self) -> str:
        text = f"{self.code}: needs {self.needed}, available {self.available}"
        if self.holders:
            text += f", held by {', '.join(map(str, self.holders))}"
        if self.behind is not None:
            text += f" (behind request {self.behind})"
        return text
