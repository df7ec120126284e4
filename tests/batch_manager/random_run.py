"""A random run of a BatchManager: everything that can be asked of one, in an order that a seed decides."""

from __future__ import annotations

import random
from dataclasses import replace

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    FinishReason,
    IterationPlan,
    KvCacheConfig,
    KvCacheManager,
    Request,
    RequestRefused,
    WaitCode,
    WaitingQueuePolicy,
)
from batch_manager.kv import BlockTransfer, CacheTier, KvCacheRetentionConfig, PinError, TokenRangeRetentionConfig
from batch_manager.request import MultimodalSpan
from batch_manager.trace import ManualClock

END_ID = 7
STOP_ID = 8


def random_configs(source: random.Random) -> tuple[BatchManagerConfig, KvCacheConfig]:
    """A small pool and tight limits, so that everything happens often."""
    chunk_unit_size = source.choice((1, 4))
    config = BatchManagerConfig(
        max_batch_size=source.randint(1, 8),
        max_num_tokens=source.randint(8, 40),
        capacity_scheduler_policy=source.choice(
            (CapacitySchedulerPolicy.MAX_UTILIZATION,) * 3
            + (CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, CapacitySchedulerPolicy.STATIC_BATCH)
        ),
        context_chunking_policy=source.choice(list(ContextChunkingPolicy)),
        chunk_unit_size=chunk_unit_size,
        long_prompt_cap=source.choice((None, 8)),
        waiting_queue_policy=source.choice(list(WaitingQueuePolicy)),
        tenant_weights={"gold": 3.0},
        max_queued_requests=source.choice((None, 6)),
        min_rows_per_sequence=source.choice((1, 2)),
        max_steps_in_flight=source.choice((1, 2)),
        num_adapter_pages=source.choice((None, 5)),
    )
    attention_window = source.choice((None, None, 6, 13))
    kv_config = KvCacheConfig(
        num_blocks=source.randint(8, 24),
        tokens_per_block=4,
        enable_block_reuse=source.random() < 0.8,
        enable_partial_reuse=source.random() < 0.7,
        attention_window=attention_window,
        host_blocks=0 if attention_window else source.choice((0, 24)),
        disk_blocks=0 if attention_window else source.choice((0, 0, 16)),
    )
    return config, kv_config


class RandomRun:
    """Drives `manager`; the same seed asks the same, as long as the manager answers the same."""

    def __init__(self, manager: BatchManager, kv: KvCacheManager, clock: ManualClock, source: random.Random) -> None:
        self.manager = manager
        self.kv = kv
        self.clock = clock
        self.source = source
        self.in_flight: list[IterationPlan] = []
        self.prompts: list[list[int]] = [[]]
        """Earlier prompts with their answers, to begin new ones with."""
        self.live: dict[int, Request] = {}
        self.held: list[int] = []
        self.transfers: list[BlockTransfer] = []
        """To be acknowledged; those to one tier in this order."""
        self.leases: list[int] = []
        self.pins: list[int] = []
        self.num_pauses = 0
        self.finish_reasons: set[FinishReason] = set()
        self._next_id = 0

    def run(self, num_actions: int) -> None:
        actions = (self.schedule,) * 6 + (self.update,) * 6 + (self.add,) * 4
        actions += (self.transfer,) * 4
        rare = (self.cancel, self.release, self.change, self.abandon, self.toggle, self.lease, self.pin, self.forget)
        for _ in range(num_actions):
            self.clock.now += self.source.random()
            self.source.choice(actions if self.source.random() < 0.9 else rare)()
        while self.in_flight:
            self.update()

    def add(self) -> None:
        source = self.source
        self._next_id += 1
        request_id = self._next_id if source.random() < 0.95 else source.randint(1, self._next_id)
        beginning = source.choice(self.prompts)
        prompt = beginning[: source.randint(0, 40)] + [source.randint(10, 13) for _ in range(source.randint(1, 12))]
        request = Request(
            request_id,
            prompt,
            source.randint(1, 24),
            end_id=END_ID,
            stop_token_ids=[STOP_ID] if source.random() < 0.3 else [],
            stop_words=[[10, 11], [12]] if source.random() < 0.2 else [],
            min_new_tokens=source.choice((0, 3)),
            priority=source.choice((0.1, 0.5, 0.9)),
            tenant=source.choice(("gold", "iron", "")),
            arrival_time=self.clock.now,
            allotted_time=source.choice((None, None, 0.0, 12.5)),
            cache_salt=source.choice((None, None, None, 1)),
            adapter_id=(adapter := source.choice((None, None, 1, 2))),
            adapter_pages=2 if adapter else 0,
            retention=KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 4, 80, 3000.0)], 10, 1000)
            if source.random() < 0.2
            else None,
            multimodal_spans=[MultimodalSpan(1, 3, b"\x01" * 32)] if source.random() < 0.1 else [],
        )
        held_for = WaitCode.GRAMMAR if source.random() < 0.1 else None
        try:
            self.manager.add_request(request, held_for)
        except RequestRefused:
            return
        self.live[request_id] = request
        if held_for is not None:
            self.held.append(request_id)
        self._propose(request)

    def _propose(self, request: Request) -> None:
        if self.source.random() < 0.3:
            request.draft_token_ids = [10] * self.source.randint(1, 5)

    def schedule(self) -> None:
        if len(self.in_flight) >= self.manager.config.max_steps_in_flight:
            return
        plan = self.manager.schedule()
        self.num_pauses += len(plan.paused)
        for request in plan.timed_out:
            self._ended(request)
        assert not (plan.is_empty and plan.copies), "an empty plan is not executed, and neither are its copies"
        if not plan.is_empty:
            self.in_flight.append(plan)
            self.transfers += self.kv.take_transfers()

    def update(self) -> None:
        if not self.in_flight:
            return
        plan = self.in_flight.pop(0)
        source = self.source
        sampled = []
        for entry in plan.scheduled:
            count = (1 + source.randint(0, entry.num_draft_tokens)) if entry.samples else 0
            sampled.append([END_ID if source.random() < 0.03 else source.randint(8, 13) for _ in range(count)])
        for made in self.manager.update(plan, sampled):
            if made.finish_reason is FinishReason.NOT_FINISHED:
                self._propose(made.request)
            else:
                self._ended(made.request)

    def _ended(self, request: Request) -> None:
        self.finish_reasons.add(request.finish_reason)
        self.prompts.append(request.token_ids)
        del self.live[request.request_id]
        self.held = [held for held in self.held if held != request.request_id]

    def cancel(self) -> None:
        request_id = self.source.choice([*self.live, 999])
        if self.manager.cancel_request(request_id):
            self._ended(self.live[request_id])

    def release(self) -> None:
        held, self.held = self.held, []
        for request_id in held:
            self.manager.release_hold(request_id)

    def abandon(self) -> None:
        if self.in_flight:
            for request in self.manager.abandon(self.in_flight.pop(0)):
                self._ended(request)

    def toggle(self) -> None:
        self.source.choice((self.manager.pause, self.manager.drain, self.manager.resume, self.manager.resume))()

    def change(self) -> None:
        config = replace(
            self.manager.config,
            max_batch_size=self.source.randint(1, 8),
            max_num_tokens=self.source.randint(8, 40),
            waiting_queue_policy=self.source.choice(list(WaitingQueuePolicy)),
            tenant_weights={"iron": 2.0},
        )
        self.manager.change_config(config)

    def transfer(self) -> None:
        if self.transfers:
            tier = self.source.choice([order.target_tier for order in self.transfers])
            order = next(order for order in self.transfers if order.target_tier is tier)
            self.transfers.remove(order)
            succeeded = self.source.random() < (0.6 if order.target_tier is CacheTier.DEVICE else 0.95)
            disappointed = self.kv.acknowledge_transfer(order.transfer_id, succeeded)
            if disappointed:
                self.manager.restart(disappointed)

    def lease(self) -> None:
        running = [request for request in self.live.values() if request.block_ids]
        if self.leases and self.source.random() < 0.7:
            self.kv.end_lease(self.leases.pop())
        elif running:
            self.leases.append(self.kv.lease(self.source.choice(running), "a peer"))

    def pin(self) -> None:
        if self.pins and self.source.random() < 0.5:
            self.kv.unpin(self.pins.pop())
        else:
            prompt = self.source.choice(self.prompts) or [10]
            try:
                self.pins.append(self.kv.pin(Request(-1, prompt, 1), seconds=None).pin_id)
            except PinError:
                return

    def forget(self) -> None:
        self.source.choice((self.kv.refresh, self.kv.clear))()
