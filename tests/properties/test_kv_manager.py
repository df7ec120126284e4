"""The KV manager against a naive one, under random requests, steps, releases and shortages."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch_manager.kv import EvictionStrategy, KvCacheConfig, KvCacheManager, KvCacheRetentionConfig, PinError
from batch_manager.request import Request
from tests.properties.naive_kv_cache import NaiveKvCache, Prefix

NAMESPACES = [(None, None), (1, None), (None, 1), (1, 1)]
PRIORITIES = [None, 0, 35, 80]


def prefixes_in_tree(kv: KvCacheManager) -> set[Prefix]:
    found = set()
    for namespace, root in kv.cache.tree.roots.items():
        for node in kv.cache.tree.behind(root):
            found.add((tuple(namespace), tuple(token for block in node.path() for token in block.key)))
    return found


class KvManagerMachine(RuleBasedStateMachine):
    """What is found, what is evicted and how many blocks are free is the naive cache's to say."""

    @initialize(
        num_blocks=st.integers(2, 12),
        size=st.integers(1, 3),
        strategy=st.sampled_from(EvictionStrategy),
        partial=st.booleans(),
        copy=st.booleans(),
    )
    def start(self, num_blocks: int, size: int, strategy: EvictionStrategy, partial: bool, copy: bool) -> None:
        self.size, self.partial, self.copy = size, partial, copy
        self.kv = KvCacheManager(
            KvCacheConfig(
                num_blocks=num_blocks,
                tokens_per_block=size,
                enable_partial_reuse=partial,
                copy_on_partial_reuse=copy,
                eviction_strategy=strategy,
            )
        )
        self.naive = NaiveKvCache(num_blocks, size, strategy.value)
        self.live: dict[int, Request] = {}
        self.stored: dict[int, Prefix] = {}
        self.next_id = self.next_iteration = 0
        self.copy_targets: dict[int, tuple[int, str]] = {}
        """By request: where the target of its copy begins, and the copy's name."""
        self.stored_targets: dict[str, Prefix] = {}
        self.copy_holds: list[tuple[Prefix, str]] = []
        self.copies_in_flight: dict[int, list[tuple[Prefix, str]]] = {}
        self.read_by_step: dict[int, set[int]] = {}
        self.pins: dict[int, Prefix] = {}

    def owner(self, request: Request) -> str:
        return f"request {request.request_id}"

    def in_flight_blocks(self) -> set[int]:
        return set().union(*self.read_by_step.values())

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        namespace=st.sampled_from(NAMESPACES),
        priority=st.sampled_from(PRIORITIES),
        extra=st.integers(0, 4),
    )
    def admit(
        self, tokens: list[int], namespace: tuple[int | None, int | None], priority: int | None, extra: int
    ) -> None:
        self.start_request(tokens, namespace, priority, extra)

    def start_request(
        self, tokens: list[int], namespace: tuple[int | None, int | None], priority: int | None, extra: int
    ) -> Request | None:
        kv, naive, size = self.kv, self.naive, self.size
        retention = None
        if priority is not None:
            whole = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, priority)
            retention = KvCacheRetentionConfig([whole], decode_retention_priority=priority)
        request = Request(
            self.next_id, tokens, 4, adapter_id=namespace[0], cache_salt=namespace[1], retention=retention
        )
        self.next_id += 1
        owner, key = self.owner(request), tuple(tokens)
        reuse = kv.find_reuse(request)
        num_whole = naive.longest_match(namespace, key)
        assert len(reuse.path) * size == num_whole
        missing = key[: num_whole + size]
        assert (reuse.first_missing_key is None) == (
            len(missing) < num_whole + size or (namespace, missing) in naive.entries
        )
        lengths = naive.partial_lengths(namespace, key, num_whole)
        source: Prefix | None = None
        if reuse.partial:
            source = (namespace, tuple(token for block in reuse.partial.node.path() for token in block.key))
            assert self.partial
            assert self.copy or naive.can_take_over(source)
            assert reuse.partial.num_tokens == max(lengths.values()) == lengths[source]
        elif self.partial and self.copy:
            assert max(lengths.values(), default=0) == 0
        assert reuse.num_tokens == num_whole + (reuse.partial.num_tokens if reuse.partial else 0)

        num_tokens = len(tokens) + extra
        path = naive.path((namespace, key[:num_whole]))
        num_fresh = -(-num_tokens // size) - len(path)
        is_copy = source is not None and not naive.takes_over(source, lengths[source], num_fresh, self.copy)
        needed = num_fresh + sum(naive.is_evictable(p) for p in path)
        needed += is_copy and naive.is_evictable(source)
        before = kv.num_free_blocks
        assert kv.num_new_blocks(request, num_tokens, reuse) == needed
        busy = self.in_flight_blocks()
        copies = kv.allocate(request, num_tokens, reuse)
        if needed > naive.num_free:
            assert copies is None
            assert request.block_ids == []
            assert kv.num_free_blocks == before
            return None
        assert copies is not None
        assert kv.num_free_blocks == before - needed
        assert request.num_computed_tokens == request.num_reused_tokens == reuse.num_tokens
        new_blocks = request.block_ids[len(path) :]
        assert busy.isdisjoint(new_blocks)
        if path:
            naive.hold(path[0], owner)
        for prefix in path:
            naive.entries[prefix].num_hits += 1
            if priority is not None:
                naive.entries[prefix].priority = priority
        count = len(new_blocks)
        if source is not None:
            naive.entries[source].num_hits += 1
            if is_copy:
                name = f"copy for {owner}"
                naive.hold(source, name)
                self.copy_holds.append((source, name))
                self.copy_targets[request.request_id] = (num_whole, name)
                assert [(c.target, c.num_tokens) for c in copies] == [(new_blocks[0], reuse.partial.num_tokens)]
            else:
                del naive.entries[source]
                assert copies == []
        naive.take(owner, count)
        self.live[request.request_id] = request
        self.stored[request.request_id] = (namespace, key[:num_whole])
        return request

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        namespace=st.sampled_from(NAMESPACES[:2]),
        priority=st.sampled_from(PRIORITIES),
    )
    def serve(self, tokens: list[int], namespace: tuple[int | None, int | None], priority: int | None) -> None:
        """A prompt is computed, stored and done with."""
        request = self.start_request(tokens, namespace, priority, 0)
        if request is not None:
            request.num_computed_tokens = len(tokens)
            self.end_request(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, count: int, token: int) -> None:
        """Some tokens get computed; those beyond the prompt are generated."""
        request = data.draw(st.sampled_from(list(self.live.values())))
        num_tokens = request.num_computed_tokens + count
        missing = self.kv.num_new_blocks(request, num_tokens)
        table, before = list(request.block_ids), self.kv.num_free_blocks
        busy = self.in_flight_blocks()
        copies = self.kv.allocate(request, num_tokens)
        if missing > self.naive.num_free:
            assert copies is None
            assert (request.block_ids, self.kv.num_free_blocks) == (table, before)
            return
        assert copies == []
        assert request.block_ids[: len(table)] == table
        assert busy.isdisjoint(request.block_ids[len(table) :])
        self.naive.take(self.owner(request), missing)
        request.token_ids += [token] * (num_tokens - len(request.token_ids))
        request.num_computed_tokens = num_tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        self.store_request(data.draw(st.sampled_from(list(self.live.values()))))

    def store_request(self, request: Request) -> None:
        namespace, stored = self.stored[request.request_id]
        self.kv.store(request, request.num_computed_tokens)
        priority = request.retention.decode_retention_priority if request.retention else 35
        for end in range(len(stored) + self.size, request.num_computed_tokens + 1, self.size):
            self.store_prefix(request, (namespace, tuple(request.token_ids[:end])), priority)

    def store_prefix(self, request: Request, prefix: Prefix, priority: int) -> None:
        naive = self.naive
        start, name = self.copy_targets.get(request.request_id, (-1, ""))
        is_target = len(naive.parent(prefix)[1]) == start
        if is_target and prefix in naive.entries:  # the copy keeps the block that the request gives back
            naive.private[name] = 1
            naive.private[self.owner(request)] -= 1
            naive.hold(prefix, self.owner(request))
            del self.copy_targets[request.request_id]
        else:
            naive.store(prefix, self.owner(request), priority)
            if is_target:
                naive.hold(prefix, f"target of {name}")
                self.stored_targets[name] = prefix
        self.stored[request.request_id] = prefix

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_request(data.draw(st.sampled_from(list(self.live.values()))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request is over: its last block is stored although it may not be full."""
        self.end_request(data.draw(st.sampled_from(list(self.live.values()))))

    def end_request(self, request: Request) -> None:
        self.store_request(request)
        self.kv.store_last_block(request, request.num_computed_tokens)
        namespace, stored = self.stored[request.request_id]
        tokens = tuple(request.token_ids[: request.num_computed_tokens])
        if self.partial and len(stored) < len(tokens) and (namespace, tokens) not in self.naive.entries:
            priority = request.retention.decode_retention_priority if request.retention else 35
            self.store_prefix(request, (namespace, tokens), priority)
        self.release_request(request)

    def release_request(self, request: Request) -> None:
        self.kv.release(request)
        _, name = self.copy_targets.pop(request.request_id, (0, ""))
        if name and name not in self.stored_targets:
            self.naive.private[self.owner(request)] -= 1
            self.naive.private[name] = 1
        self.naive.give_back(self.owner(request))
        prefix = self.stored.pop(request.request_id)
        if prefix[1]:
            self.naive.unhold(prefix, self.owner(request))
        del self.live[request.request_id]
        assert request.block_ids == []

    @precondition(lambda self: self.naive.entries)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        namespace, tokens = data.draw(st.sampled_from(sorted(self.naive.entries, key=repr)))
        prefix = (namespace, tokens[: len(tokens) // self.size * self.size])
        if not prefix[1]:
            return
        request = Request(-1, tokens, 1, adapter_id=namespace[0], cache_salt=namespace[1])
        pinned = set().union(*(self.naive.path(other) for other in self.pins.values()))
        if len(pinned.union(self.naive.path(prefix))) > int(self.kv.num_blocks * 0.25):
            with pytest.raises(PinError, match="of at most"):
                self.kv.pin(request)
            return
        pin = self.kv.pin(request)
        assert pin.num_tokens == len(prefix[1])
        self.pins[pin.pin_id] = prefix
        self.naive.hold(prefix, f"pin {pin.pin_id}")

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id = data.draw(st.sampled_from(sorted(self.pins)))
        self.kv.unpin(pin_id)
        self.naive.unhold(self.pins.pop(pin_id), f"pin {pin_id}")

    @rule()
    def begin_step(self) -> None:
        self.kv.begin_step(self.next_iteration)
        self.naive.begin_step(self.next_iteration)
        self.read_by_step[self.next_iteration] = {b for r in self.live.values() for b in r.block_ids}
        self.copies_in_flight[self.next_iteration] = self.copy_holds
        self.copy_holds = []
        self.next_iteration += 1

    @precondition(lambda self: self.read_by_step)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        iteration = data.draw(st.sampled_from(sorted(self.read_by_step)))
        self.kv.end_step(iteration)
        self.naive.end_step(iteration)
        for prefix, name in self.copies_in_flight.pop(iteration):
            self.naive.give_back(name)
            if name in self.stored_targets:
                self.naive.unhold(self.stored_targets.pop(name), f"target of {name}")
            self.naive.unhold(prefix, name)
            self.copy_targets = {r: target for r, target in self.copy_targets.items() if target[1] != name}
        del self.read_by_step[iteration]

    @invariant()
    def agrees_with_the_naive_cache(self) -> None:
        if hasattr(self, "kv"):
            assert self.kv.num_free_blocks == self.naive.num_free
            assert prefixes_in_tree(self.kv) == set(self.naive.entries)
            self.kv.check_invariants()

    def teardown(self) -> None:
        """When all is given back, nothing is used."""
        if hasattr(self, "kv"):
            for pin_id in self.pins:
                self.kv.unpin(pin_id)
            for request in self.live.values():
                self.kv.release(request)
            if self.copy_holds:
                self.begin_step()
            for iteration in sorted(self.read_by_step):
                self.kv.end_step(iteration)
            assert self.kv.num_free_blocks == self.kv.num_blocks
            assert self.kv.ledger().counts.used == 0
            self.kv.check_invariants()


TestKvManager = KvManagerMachine.TestCase
TestKvManager.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.long
class TestKvManagerLong(KvManagerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
