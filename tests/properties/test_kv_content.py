"""What requests read is what they would have computed, whatever is shared, copied, evicted, moved or lost."""

from __future__ import annotations

import contextlib
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch_manager.kv import (
    NO_BLOCK,
    BlockTransfer,
    CacheTier,
    KvCacheConfig,
    KvCacheManager,
    KvCacheMirror,
    KvCacheRetentionConfig,
    PinError,
)
from batch_manager.kv.events import MirroredBlock
from batch_manager.plan import BlockCopy
from batch_manager.request import Request
from tests.properties.simulated_kv_memory import SimulatedKvMemory, content

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)
SALTS = st.sampled_from([None, None, None, 1])
PRIORITIES = st.sampled_from([None, None, 10, 60])
DURATIONS = st.sampled_from([None, 1000])


def mirrored(kv: KvCacheManager) -> dict[bytes, MirroredBlock]:
    """What a reader of the events has to know."""
    expected = {}
    for root in kv.cache.tree.roots.values():
        for node in kv.cache.tree.behind(root):
            tier = kv.cache.nearest(node)
            if tier is not None:
                assert node.parent is not None
                expected[node.digest] = MirroredBlock(
                    node.parent.digest, node.key, root.namespace.adapter_id, tier, node.priority
                )
    return expected


class KvContentMachine(RuleBasedStateMachine):
    """Requests run in steps over a memory that knows what is written in it."""

    def prepare(self, config: KvCacheConfig) -> None:
        self.now = 0.0
        self.config = config
        self.kv = KvCacheManager(config, clock=lambda: self.now)
        self.memory = SimulatedKvMemory(
            config.num_blocks, config.host_blocks, config.disk_blocks, config.tokens_per_block
        )
        self.mirror = KvCacheMirror()
        self.live: dict[int, Request] = {}
        self.copies: list[BlockCopy] = []
        self.steps: deque[tuple[int, list[tuple[Request, list[int], int]]]] = deque()
        self.transfers: deque[BlockTransfer] = deque()
        self.leases: dict[int, list[tuple[int, list[object]]]] = {}
        self.pins: list[int] = []
        self.next_id = self.next_iteration = 0

    def busy_blocks(self) -> set[int]:
        """Blocks that a step, transfer or lease may touch."""
        busy = {block for _, requests in self.steps for _, table, _ in requests for block in table}
        busy |= {o.source_slot for o in self.transfers if o.source_tier is CacheTier.DEVICE}
        busy |= {o.target_slot for o in self.transfers if o.target_tier is CacheTier.DEVICE}
        return busy | {block for blocks in self.leases.values() for block, _ in blocks}

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=6), salt=SALTS, priority=PRIORITIES, duration=DURATIONS)
    def serve(self, prompts: list[list[int]], salt: int | None, priority: int | None, duration: int | None) -> None:
        """Prompts are admitted, computed in one step each, and done with."""
        for tokens in prompts:
            request = self.start_request(tokens, salt, priority, duration)
            while request is not None and self.kv.is_loading(request):
                self.take_transfers()
                self.acknowledge(self.transfers.popleft(), fails=False)
            if request is not None:
                self.run_step([(request, len(tokens))], 0)
                self.kv.store_last_block(request, len(tokens))
                self.release_request(request)
                while self.steps:
                    self.end_step()

    @rule(tokens=PROMPTS, salt=SALTS, priority=PRIORITIES, duration=DURATIONS)
    def admit(self, tokens: list[int], salt: int | None, priority: int | None, duration: int | None) -> None:
        self.start_request(tokens, salt, priority, duration)

    def start_request(
        self, tokens: list[int], salt: int | None, priority: int | None, duration: int | None
    ) -> Request | None:
        retention = None
        if priority is not None:
            whole = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 5, priority, duration)
            retention = KvCacheRetentionConfig([whole], priority, duration)
        request = Request(self.next_id, tokens, 4, cache_salt=salt, retention=retention)
        self.next_id += 1
        reuse = self.kv.find_reuse(request)
        found = {block for block in reuse.block_ids if block != NO_BLOCK}
        available, busy = self.kv.num_free_blocks, self.busy_blocks()
        expected = self.kv.num_new_blocks(request, len(tokens), reuse)
        copies = self.kv.allocate(request, len(tokens), reuse)
        if copies is None:
            assert expected > available
            assert request.block_ids == []
            assert self.kv.num_free_blocks == available
            return None
        assert self.kv.num_free_blocks == available - expected
        assert busy.isdisjoint(set(request.block_ids) - found - {NO_BLOCK})
        self.copies += copies
        self.live[request.request_id] = request
        return request

    def runnable(self) -> list[Request]:
        return [request for request in self.live.values() if not self.kv.is_loading(request)]

    @precondition(lambda self: self.runnable())
    @rule(data=st.data(), count=st.integers(1, 6), num_drafts=st.integers(0, 3))
    def step(self, data: st.DataObject, count: int, num_drafts: int) -> None:
        """A few requests compute some tokens; what follows the committed ones are drafts that get rejected."""
        chosen = data.draw(st.lists(st.sampled_from(self.runnable()), min_size=1, max_size=3, unique=True))
        scheduled = []
        for request in chosen:
            end = request.num_computed_tokens + count
            busy, table = self.busy_blocks(), len(request.block_ids)
            if self.kv.allocate(request, end + num_drafts) is not None:
                assert busy.isdisjoint(request.block_ids[table:])
                request.token_ids += [data.draw(st.integers(0, 1)) for _ in range(end - len(request.token_ids))]
                scheduled.append((request, end))
        self.run_step(scheduled, num_drafts)

    def run_step(self, scheduled: list[tuple[Request, int]], num_drafts: int) -> None:
        """Copies run, then the requests compute up to the given ends."""
        self.kv.begin_step(self.next_iteration)
        self.memory.copy(self.copies)
        self.copies = []
        in_step = []
        for request, end in scheduled:
            self.memory.assert_readable(request, request.num_computed_tokens, self.config.attention_window)
            for position in range(request.num_computed_tokens, end):
                self.memory.write(request, position)
            for position in range(end, end + num_drafts):
                self.memory.write_rejected_draft(request, position)
            request.num_computed_tokens = end
            in_step.append((request, list(request.block_ids), end))
            self.kv.store(request, end)
        self.steps.append((self.next_iteration, in_step))
        self.next_iteration += 1
        self.take_transfers()

    def take_transfers(self) -> None:
        busy_slots = {(o.target_tier, o.target_slot) for o in self.transfers}
        busy_slots |= {(o.source_tier, o.source_slot) for o in self.transfers}
        for order in self.kv.take_transfers():
            assert (order.target_tier, order.target_slot) not in busy_slots
            self.transfers.append(order)

    @precondition(lambda self: self.steps)
    @rule()
    def oldest_step_ends(self) -> None:
        self.end_step()

    def end_step(self) -> None:
        """Nothing the step touched was given to anybody else while it was in flight."""
        iteration, requests = self.steps.popleft()
        for request, table, end in requests:
            window = self.config.attention_window
            for position in range(0 if window is None else max(end - window, 0), end):
                block_id = table[position // self.memory.size]
                assert self.memory.device[block_id][position % self.memory.size] == content(request, position)
        self.kv.end_step(iteration)

    def acknowledge(self, order: BlockTransfer, fails: bool) -> None:
        if fails:
            self.memory.damage(order.target_tier, order.target_slot)
        else:
            self.memory.transfer(order)
        before = {request_id: request.num_computed_tokens for request_id, request in self.live.items()}
        again = self.kv.acknowledge_transfer(order.transfer_id, not fails)
        assert not again or fails
        for request in again:
            assert before[request.request_id] > 0
            assert (request.block_ids, request.num_computed_tokens) == ([], 0)
            del self.live[request.request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_request(data.draw(st.sampled_from(list(self.live.values()))))

    @precondition(lambda self: self.runnable())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request that has run is over: its last block is stored although it may not be full."""
        request = data.draw(st.sampled_from(self.runnable()))
        if request.num_computed_tokens > request.num_reused_tokens:
            self.kv.store_last_block(request, request.num_computed_tokens)
        self.release_request(request)

    def release_request(self, request: Request) -> None:
        del self.live[request.request_id]
        self.kv.release(request)
        self.kv.release(request)

    @rule(data=st.data(), action=st.sampled_from(["lease", "end_lease", "pin", "unpin", "wait", "clear"]))
    def do_something_rare(self, data: st.DataObject, action: str) -> None:
        request = data.draw(st.sampled_from(self.runnable())) if self.runnable() else None
        if action == "lease" and request is not None:
            written = request.block_ids[: request.num_computed_tokens // self.memory.size]
            blocks = [(block, list(self.memory.device[block])) for block in written if block != NO_BLOCK]
            self.leases[self.kv.lease(request, "peer")] = blocks
        elif action == "end_lease" and self.leases:
            lease_id = data.draw(st.sampled_from(sorted(self.leases)))
            for block_id, before in self.leases.pop(lease_id):
                assert self.memory.device[block_id] == before
            self.kv.end_lease(lease_id)
        elif action == "pin" and request is not None:
            seconds = data.draw(st.sampled_from([None, 2.0]))
            with contextlib.suppress(PinError):
                pin = self.kv.pin(request, seconds)
                self.pins += [pin.pin_id] if seconds is None else []
        elif action == "unpin" and self.pins:
            self.kv.unpin(self.pins.pop())
        elif action == "wait":
            self.now += 0.7
            self.kv.refresh()
        elif action == "clear" and data.draw(st.integers(0, 3)) == 0:
            self.kv.clear()
            assert all(self.kv.find_reuse(request).num_tokens == 0 for request in self.live.values())

    @invariant()
    def adds_up_and_is_told_to_the_outside(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants()
            for event in self.kv.take_events():
                self.mirror.apply(event)
            assert self.mirror.is_complete
            assert self.mirror.blocks == mirrored(self.kv)

    def teardown(self) -> None:
        """When everybody is gone, all blocks are back, and a snapshot says the same as the whole stream."""
        if not hasattr(self, "kv"):
            return
        snapshot = KvCacheMirror()
        for event in self.kv.snapshot_events():
            snapshot.apply(event)
        assert snapshot.blocks == self.mirror.blocks
        for request in self.live.values():
            self.kv.release(request)
        for lease_id in self.leases:
            self.kv.end_lease(lease_id)
        for pin_id in self.pins:
            self.kv.unpin(pin_id)
        self.now += 100.0
        self.kv.begin_step(self.next_iteration)
        num_left = 10 * (self.config.num_blocks + self.config.host_blocks + self.config.disk_blocks)
        while self.transfers or (orders := self.kv.take_transfers()):
            self.transfers.extend([] if self.transfers else orders)
            num_left -= 1
            assert num_left, "transfers without end although nothing happens any more"
            self.kv.acknowledge_transfer(self.transfers.popleft().transfer_id, True)
        for iteration in [iteration for iteration, _ in self.steps] + [self.next_iteration]:
            self.kv.end_step(iteration)
        self.kv.check_invariants()
        counts = self.kv.ledger().counts
        assert (counts.used, counts.leased) == (0, 0)
        assert self.kv.find_leaks([]) == []


class FullAttentionMachine(KvContentMachine):
    """Three tiers; loads may fail."""

    @initialize(
        num_blocks=st.integers(5, 14),
        size=st.integers(1, 4),
        host=st.integers(0, 12),
        disk=st.integers(0, 12),
        free_fraction=st.sampled_from([0.5, 1.0]),
        max_orders=st.integers(1, 4),
    )
    def start(self, num_blocks: int, size: int, host: int, disk: int, free_fraction: float, max_orders: int) -> None:
        self.prepare(
            KvCacheConfig(
                num_blocks=num_blocks,
                tokens_per_block=size,
                host_blocks=host,
                disk_blocks=disk,
                offload_free_fraction=free_fraction,
                max_offloads_per_step=max_orders,
                max_pinned_fraction=0.5,
                event_buffer_max_size=10_000,
            )
        )

    @precondition(lambda self: self.transfers)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def oldest_transfer_ends(self, fails: bool) -> None:
        self.acknowledge(self.transfers.popleft(), fails)

    @precondition(lambda self: self.transfers)
    @rule()
    def all_transfers_end(self) -> None:
        while self.transfers:
            self.acknowledge(self.transfers.popleft(), fails=False)

    @rule()
    def begin_and_end_an_empty_step(self) -> None:
        self.kv.begin_step(self.next_iteration)
        self.memory.copy(self.copies)
        self.copies = []
        self.steps.append((self.next_iteration, []))
        self.next_iteration += 1
        self.take_transfers()


class WindowMachine(KvContentMachine):
    """Tokens attend to the last few positions only; what falls out of the window is given back."""

    @initialize(num_blocks=st.integers(5, 14), size=st.integers(1, 4), window=st.integers(1, 9))
    def start(self, num_blocks: int, size: int, window: int) -> None:
        self.prepare(
            KvCacheConfig(
                num_blocks=num_blocks,
                tokens_per_block=size,
                attention_window=window,
                max_pinned_fraction=0.5,
                event_buffer_max_size=10_000,
            )
        )


TestFullAttention = FullAttentionMachine.TestCase
TestWindow = WindowMachine.TestCase
TestFullAttention.settings = TestWindow.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.long
class TestFullAttentionLong(FullAttentionMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)


@pytest.mark.long
class TestWindowLong(WindowMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
