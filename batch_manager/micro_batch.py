"""Puts one iteration together: which running requests advance, and by how much, within the row budget.

```
 rows of the iteration (max_num_tokens)
 | generation requests, in order: 1 (+ drafts) each | contexts: what is left, shared by the chunking policy |
```
Generation requests take their rows first, so that a long prompt cannot stall them; contexts, running ones before newly
admitted ones, share the rest. In the plan the contexts come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from batch_manager.config import BatchManagerConfig
from batch_manager.plan import Phase, ScheduledRequest
from batch_manager.policies.chunking import ChunkingPolicy, ChunkRules, ContextDemand
from batch_manager.reasons import WaitCode
from batch_manager.request import Request, RequestState

GENERATION = Phase.GENERATION
CONTEXT = Phase.CONTEXT
new_tuple = tuple.__new__
"""Builds a NamedTuple without the call of its `__new__`, which is half of what a scheduled request costs."""


class Growth(NamedTuple):
    """How running requests get blocks."""

    require: Callable[[Request, int], bool]
    """Cover so many positions, pausing others if need be; False: the request itself was paused."""
    try_cover: Callable[[Request, int], None]
    """Cover so many positions if blocks are free."""


class Stalled(NamedTuple):
    """A running request that does not advance in this iteration, and what it lacks: rows, blocks, or (needed,
    available) its beam width."""

    request: Request
    code: WaitCode
    needed: int
    available: int


class MicroBatch:
    """One iteration being put together."""

    def __init__(
        self,
        config: BatchManagerConfig,
        chunking: ChunkingPolicy,
        growth: Growth,
        tokens_per_block: int,
        is_contended: bool,
    ) -> None:
        """`is_contended`: there is more than one request, so that the long-prompt cap counts."""
        self.rows_left = config.max_num_tokens
        """Rows neither scheduled nor claimed by a context."""
        self._beam_width = 0
        """Of all that is scheduled: that of the first in order, so that every width has its turn; 0: nothing is yet."""
        self.stalled: list[Stalled] = []
        self._generation: list[ScheduledRequest] = []
        self._contexts: list[Request] = []
        self._demands: list[ContextDemand] = []
        self._context_rows = 0
        self._min_rows = config.min_rows_per_sequence
        self._rules = ChunkRules(config.chunk_unit_size, config.min_rows_per_sequence)
        self._draft_unit = config.chunk_unit_size if config.chunk_unit_size > 1 else tokens_per_block
        self._chunking = chunking
        self._growth = growth
        self._cap: int | None = None
        if config.long_prompt_cap is not None and is_contended:
            self._cap = config.long_prompt_cap - config.long_prompt_cap % config.chunk_unit_size

    @property
    def requests(self) -> list[Request]:
        """Those that have a part in the iteration so far."""
        return [*self._contexts, *(entry.request for entry in self._generation)]

    def add_running(self, requests: Iterable[Request], contexts: list[Request]) -> None:
        """Schedule the generating ones among `requests`, collect the others in `contexts`.

        This loop runs once for each running sequence and iteration, and is written to be fast.
        """
        rows_left = self.rows_left
        min_rows = self._min_rows
        scheduled = self._generation.append
        beam_width = self._beam_width
        for request in requests:
            if request.beam_width != beam_width:
                if beam_width:
                    self.stalled.append(Stalled(request, WaitCode.BEAM_WIDTH, request.beam_width, beam_width))
                    continue
                beam_width = request.beam_width
            start = request.num_computed_tokens
            if start < request.context_end:
                contexts.append(request)
                continue
            num_tokens = request.num_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is being sampled
            num_drafts = 0
            cost = beam_width
            if request.draft_token_ids:
                if request.num_drafts_in_flight:
                    continue  # how many of them are accepted decides where it goes on
                num_drafts = self._fit_drafts(request, num_tokens, rows_left - beam_width)
                cost += num_drafts
            if cost < min_rows:
                cost = min_rows
            if cost > rows_left:
                self.stalled.append(Stalled(request, WaitCode.TOKEN_BUDGET, cost, rows_left))
                continue
            end = start + 1 + num_drafts
            if end > request.num_allocated_tokens and not self._growth.require(request, end):
                if request.state is RequestState.RUNNING:
                    self.stalled.append(Stalled(request, WaitCode.KV_CAPACITY, 1, 0))
                continue
            rows_left -= cost
            if num_drafts:
                request.num_drafts_in_flight = num_drafts
            request.num_computed_tokens = end
            request.num_tokens = num_tokens + 1
            scheduled(
                new_tuple(
                    ScheduledRequest,
                    (
                        request,
                        start,
                        end - start,
                        cost - num_drafts - beam_width,
                        num_drafts,
                        num_tokens + num_drafts,
                        request.num_reused_tokens,
                        True,
                        GENERATION,
                    ),
                )
            )
        self.rows_left = rows_left
        self._beam_width = beam_width

    def _fit_drafts(self, request: Request, num_tokens: int, rows: int) -> int:
        """Cut the drafts to what tokens, rows and blocks allow; returns how many are left."""
        drafts = request.draft_token_ids
        if request.num_placeholder_tokens:
            drafts.clear()  # they follow a token that is no longer the last one
            return 0
        num_drafts = max(0, min(len(drafts), rows, request.max_num_tokens - num_tokens - 1))
        if num_tokens + num_drafts > request.num_allocated_tokens:
            self._growth.try_cover(request, num_tokens + num_drafts)
            num_drafts = max(0, min(num_drafts, request.num_allocated_tokens - num_tokens))
        del drafts[num_drafts:]
        return num_drafts

    def can_claim(self, request: Request, num_remaining_tokens: int) -> bool:
        """Whether a context with so many tokens to compute can be sure of a chunk in this iteration."""
        demand = self._demand(request, num_remaining_tokens)
        return self._chunking.claim(demand, self.rows_left, self._rules) > 0

    def add_context(self, request: Request) -> None:
        """Give an admitted context its place, if there are rows for it and it has the iteration's beam width."""
        if request.beam_width != self._beam_width:
            if self._beam_width:
                self.stalled.append(Stalled(request, WaitCode.BEAM_WIDTH, request.beam_width, self._beam_width))
                return
            self._beam_width = request.beam_width
        demand = self._demand(request, request.context_end - request.num_computed_tokens)
        rows = self._chunking.claim(demand, self.rows_left, self._rules)
        if not rows:
            self.stalled.append(Stalled(request, WaitCode.TOKEN_BUDGET, self._min_rows, self.rows_left))
            return
        self.rows_left -= rows
        self._context_rows += rows
        self._contexts.append(request)
        self._demands.append(demand)

    def _demand(self, request: Request, remaining: int) -> ContextDemand:
        limit = remaining if self._cap is None else min(remaining, self._cap)
        num_drafts = min(len(request.draft_token_ids), request.max_num_tokens - len(request.token_ids) - 1)
        return ContextDemand(remaining, limit, num_drafts)

    def settle(self) -> list[ScheduledRequest]:
        """Share the rows between contexts, and return all that is scheduled: contexts, then generation."""
        if not self._contexts:
            return self._generation
        rows = self._context_rows + self.rows_left
        fits_whole = sum(demand.remaining + demand.num_drafts for demand in self._demands) <= rows
        sizes = self._chunking.share(self._demands, rows, self._rules)
        self.rows_left = rows - sum(map(self._rules.cost, sizes))
        contexts = [
            self._schedule_context(request, size, fits_whole)
            for request, size in zip(self._contexts, sizes, strict=True)
        ]
        return contexts + self._generation

    def _schedule_context(self, request: Request, size: int, fits_whole: bool) -> ScheduledRequest:
        start = request.num_computed_tokens
        padding = self._rules.cost(size) - size
        is_last = start + size == request.context_end
        num_drafts = 0
        if is_last and request.draft_token_ids:
            spare = self.rows_left + padding
            if not fits_whole:  # no further unit (block) is begun just for drafts
                spare = min(spare, -size % self._draft_unit)
            num_drafts = self._fit_drafts(request, request.context_end, spare)
            request.num_drafts_in_flight = num_drafts
            self.rows_left -= max(0, num_drafts - padding)
            padding = max(0, padding - num_drafts)
        request.num_computed_tokens = start + size + num_drafts
        if is_last:
            request.num_tokens += 1
        return ScheduledRequest(
            request,
            start,
            size + num_drafts,
            min(start, padding),
            num_drafts,
            len(request.token_ids) + num_drafts,
            request.num_reused_tokens,
            is_last,
            CONTEXT,
        )
