"""A BatchManager with a made-up engine that notices every position it reads and every token it gives.

The engine's next token is a function of the tokens before it, so what a request generates is known beforehand and must
not depend on batching, chunks, reuse, pauses, drafts or overlap. A block's slot holds the tokens up to its position,
so a table that shows a step the wrong content is caught when the step reads it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    FinishReason,
    IterationPlan,
    KvCacheConfig,
    KvCacheManager,
    Request,
    RequestState,
    ScheduledRequest,
    WaitCode,
)
from batch_manager.policies.capacity import tokens_to_completion
from tests.batch_manager.harness import VirtualClock

STOP = 0
VOCABULARY = 40


def next_token(tokens: Sequence[int]) -> int:
    """What the engine gives after `tokens`."""
    return (31 * tokens[-1] + 7 * tokens[-2 if len(tokens) > 1 else -1] + len(tokens)) % VOCABULARY


def whole_output(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What a request generates if nothing stops it but the stop token and its length."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


class InFlight(NamedTuple):
    plan: IterationPlan
    sampled: list[list[int]]
    tables: list[list[int]]
    """Block tables when the step began."""


class SchedulerModel:
    """Runs a BatchManager and checks the invariants after each operation."""

    def __init__(self, config: BatchManagerConfig, kv_config: KvCacheConfig) -> None:
        self.clock = VirtualClock()
        self.kv = KvCacheManager(kv_config, self.clock)
        self.manager = BatchManager(config, self.kv, self.clock)
        self.requests: dict[int, Request] = {}
        """All that were taken in."""
        self.finals: Counter[int] = Counter()
        """How often a request's end was reported."""
        self.held: set[int] = set()
        self.is_paused = False
        self.is_draining = False
        self.in_flight: deque[InFlight] = deque()
        self.num_iterations = 0
        self._slots: dict[tuple[int, int], tuple[object, ...]] = {}
        self._future_tokens: dict[int, list[int]] = {}
        """Tokens sampled by steps in flight, by request id."""

    @property
    def config(self) -> BatchManagerConfig:
        return self.manager.config

    @property
    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished]

    # Operations

    def add(self, request: Request, held: WaitCode | None = None) -> None:
        self.manager.add_request(request, held)
        self.requests[request.request_id] = request
        if held is not None:
            self.held.add(request.request_id)

    def release_holds(self) -> None:
        for request_id in self.held:
            if not self.requests[request_id].is_finished:
                self.manager.release_hold(request_id)
        self.held.clear()

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds

    def pause(self) -> None:
        self.manager.pause()
        self.is_paused = True

    def drain(self) -> None:
        self.manager.drain()
        self.is_draining = True

    def resume(self) -> None:
        self.manager.resume()
        self.is_paused = self.is_draining = False

    def cancel(self, request: Request) -> None:
        was_live = not request.is_finished
        assert self.manager.cancel_request(request.request_id) == was_live
        if was_live:
            assert request.finish_reason is FinishReason.CANCELLED
            self._end(request)

    def schedule(self) -> IterationPlan:
        """Plan an iteration and let the engine begin it."""
        for request in self.live:
            self._propose_drafts(request)
        in_flight = list(self.in_flight)
        plan = self.manager.schedule()
        for request in plan.timed_out:
            assert request.finish_reason is FinishReason.TIMED_OUT
            self._end(request)
        self._check_plan(plan, in_flight)
        assert not (plan.is_empty and plan.copies), "an empty plan is not executed, and neither are its copies"
        if not plan.is_empty:
            self.num_iterations += 1
            self._begin(plan)
        return plan

    def update(self) -> None:
        """The oldest iteration in flight ends."""
        step = self.in_flight.popleft()
        ended_before = {entry.request.request_id for entry in step.plan.scheduled if entry.request.is_finished}
        self._take_future_tokens(step)
        progress = self.manager.update(step.plan, step.sampled)
        reported = {entry.request.request_id for entry in progress}
        for entry, tokens in zip(step.plan.scheduled, step.sampled, strict=True):
            request_id = entry.request.request_id
            assert (request_id in reported) == (bool(tokens) and request_id not in ended_before)
        for result in progress:
            assert result.request.token_ids[-len(result.new_token_ids) :] == result.new_token_ids
            assert (result.finish_reason is not FinishReason.NOT_FINISHED) == result.request.is_finished
            if result.request.is_finished:
                self._end(result.request)

    def abandon(self) -> None:
        """The oldest iteration in flight fails."""
        step = self.in_flight.popleft()
        self._take_future_tokens(step)
        for table in step.tables:  # nobody may trust what it left
            for block_id in table:
                for slot in range(self.kv.tokens_per_block):
                    if self.kv.pool.cached[block_id] is None:
                        self._slots.pop((block_id, slot), None)
        for request in self.manager.abandon(step.plan):
            assert request.is_finished
            self._end(request)
        assert all(entry.request.is_finished for entry in step.plan.scheduled)

    # The engine

    def _begin(self, plan: IterationPlan) -> None:
        size = self.kv.tokens_per_block
        for copy in plan.copies:
            for slot in range(copy.num_tokens):
                self._slots[copy.target, slot] = self._slots[copy.source, slot]
        sampled = []
        for entry in plan.scheduled:
            request = entry.request
            table = request.block_ids
            tokens = [*request.token_ids, *self._future_tokens.get(request.request_id, ())]
            tokens += request.draft_token_ids[: entry.num_draft_tokens]
            end = entry.start + entry.num_scheduled_tokens
            assert len(tokens) >= end
            assert entry.samples == (end == len(tokens))
            for position in range(end):
                where = (table[position // size], position % size)
                content = (request.cache_salt, *tokens[: position + 1])
                if position < entry.start:
                    assert self._slots.get(where) == content, f"position {position} of {request}, block {where}"
                else:
                    self._slots[where] = content
            sampled.append(self._sample(entry, tokens))
            if sampled[-1]:
                self._future_tokens.setdefault(request.request_id, []).extend(sampled[-1])
        tables = [list(entry.request.block_ids) for entry in plan.scheduled]
        self.in_flight.append(InFlight(plan, sampled, tables))

    def _sample(self, entry: ScheduledRequest, tokens: list[int]) -> list[int]:
        """One token, and with drafts those that are what the engine would have given."""
        if not entry.samples:
            return []
        sampled = []
        for count in range(len(tokens) - entry.num_draft_tokens, len(tokens) + 1):
            sampled.append(next_token(tokens[:count]))
            if count == len(tokens) or tokens[count] != sampled[-1]:
                break
        return sampled

    def _take_future_tokens(self, step: InFlight) -> None:
        for entry, tokens in zip(step.plan.scheduled, step.sampled, strict=True):
            if tokens:
                future = self._future_tokens[entry.request.request_id]
                assert future[: len(tokens)] == tokens
                del future[: len(tokens)]

    def _propose_drafts(self, request: Request) -> None:
        """Right ones, wrong ones, none: as the request's id and length have it."""
        if request.num_drafts_in_flight or request.num_placeholder_tokens or request.draft_token_ids:
            return
        num_right, num_wrong = (request.request_id * 5 + len(request.token_ids)) % 4, len(request.token_ids) % 3
        if request.request_id % 3 == 0 and num_right:
            tokens = list(request.token_ids)
            for _ in range(num_right):
                tokens.append(next_token(tokens))
            request.draft_token_ids = tokens[len(request.token_ids) :] + [VOCABULARY] * num_wrong

    # Checks

    def _end(self, request: Request) -> None:
        self.finals[request.request_id] += 1
        assert self.finals[request.request_id] == 1
        expected = whole_output(request.token_ids[: request.num_prompt_tokens], request.max_new_tokens)
        output = request.token_ids[request.num_prompt_tokens :]
        assert output == expected[: len(output)]
        if request.finish_reason in (FinishReason.END_ID, FinishReason.LENGTH):
            assert output == expected
        receipt = request.receipt
        assert receipt.finish_time == self.clock.now
        assert len(receipt.pauses) == request.num_pauses
        assert receipt.num_recomputed_tokens <= receipt.num_computed_tokens
        assert receipt.block_seconds >= 0
        total = receipt.finish_time - receipt.arrival_time
        assert receipt.queue_seconds + receipt.paused_seconds <= total + 1e-9

    def _check_plan(self, plan: IterationPlan, in_flight: list[InFlight]) -> None:
        config = self.config
        rows = 0
        for entry in plan.scheduled:
            request = entry.request
            rows += max(entry.num_rows, config.min_rows_per_sequence)
            assert request.state is RequestState.RUNNING
            assert entry.num_scheduled_tokens >= 1
            assert entry.num_rows >= min(config.min_rows_per_sequence, entry.start + entry.num_scheduled_tokens)
            assert entry.start >= entry.num_replayed_tokens
            assert entry.start + entry.num_scheduled_tokens <= tokens_to_completion(request)
            assert entry.start + entry.num_scheduled_tokens <= len(request.block_ids) * self.kv.tokens_per_block
        assert rows == plan.num_tokens <= config.max_num_tokens
        assert len(plan.scheduled) <= config.max_batch_size
        assert len({entry.request.request_id for entry in plan.scheduled}) == len(plan.scheduled)
        self._check_fences(plan, in_flight)
        if plan.is_empty and not in_flight and not self.is_paused:
            waiting_for_somebody = [
                request
                for request in self.live
                if request.request_id in self.held or (self.is_draining and request.receipt.admission_time is None)
            ]
            assert waiting_for_somebody == self.live, "there is work, but nothing runs"

    def _check_fences(self, plan: IterationPlan, in_flight: list[InFlight]) -> None:
        """What a step in flight may touch is not written by another request."""
        size = self.kv.tokens_per_block
        for step in in_flight:
            owner = {}
            for entry, table in zip(step.plan.scheduled, step.tables, strict=True):
                owner.update(dict.fromkeys(table, entry.request))
            for entry in plan.scheduled:
                for block_id in entry.request.block_ids[entry.start // size :]:
                    assert owner.get(block_id, entry.request) is entry.request, f"block {block_id} is in use"
            for copy in plan.copies:
                assert copy.target not in owner

    def check_books(self) -> None:
        """Every count kept is what a recount gives."""
        self.kv.check_invariants()
        life = self.manager._life
        live = self.live
        assert set(life.requests) == {request.request_id for request in live}
        running = [request for request in live if request.state is RequestState.RUNNING]
        waiting = [request for request in live if request.state is not RequestState.RUNNING]
        assert life.running == sorted(running, key=lambda request: request.order_key)
        assert self.manager.num_waiting == len(waiting)
        assert life.waiting.num_tokens == sum(len(request.token_ids) for request in waiting)
        in_line = {request.request_id for request in waiting if request.parked is None}
        assert {request.request_id for request in life.waiting.queue} == in_line
        size = self.kv.tokens_per_block
        growth = protected = 0
        for request in running:
            completion = -(-tokens_to_completion(request) // size)
            assert request.num_reserved_blocks == completion - len(request.block_ids)
            growth += request.num_reserved_blocks
            protected += completion if request.num_pauses >= self.config.max_pauses_per_request else 0
        assert (life.blocks.reservations.growth, life.blocks.reservations.protected) == (growth, protected)
        reasons = self.manager.explain_all()
        for request in waiting:
            assert not request.block_ids
            assert request.num_computed_tokens == 0
            assert request.request_id in reasons
        for request in self.requests.values():
            assert request.num_pauses <= self.config.max_pauses_per_request
            assert request.is_finished == (self.finals[request.request_id] == 1)
            assert not (request.is_finished and request.block_ids)
        if not live and not self.in_flight:
            assert self.kv.num_free_blocks == self.kv.num_blocks
            assert not life.deferral._contributors
            assert not life.adapters.num_used_pages
