"""The scheduler's invariants hold under any order of arrivals, cancels, pauses, deadlines, rejected drafts, failed
steps and changes of policy, with one or two iterations in flight."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batch_manager import (
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    Request,
    RequestRefused,
    WaitCode,
    WaitingQueuePolicy,
)
from tests.properties.scheduler_model import STOP, VOCABULARY, SchedulerModel

KV_POLICIES = [policy for policy in CapacitySchedulerPolicy if policy is not CapacitySchedulerPolicy.MAX_REQUESTS]
TENANTS = ("a", "b", "c")

limits = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(2, 8),
        "max_num_tokens": st.integers(8, 40),
        "capacity_scheduler_policy": st.sampled_from(KV_POLICIES),
        "context_chunking_policy": st.sampled_from(ContextChunkingPolicy),
        "long_prompt_cap": st.none() | st.integers(4, 12),
        "waiting_queue_policy": st.sampled_from(WaitingQueuePolicy),
        "priority_ageing": st.none() | st.sampled_from([1.0, 20.0]),
        "tenant_weights": st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.5, 1.0, 4.0])),
        "enable_prefix_deferral": st.booleans(),
    }
)
arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prefix": st.integers(0, 2),
            "prefix_length": st.integers(0, 16),
            "own_length": st.integers(0, 6),
            "max_new_tokens": st.integers(1, 24),
            "priority": st.sampled_from([0.5, 0.0, 1.0]),
            "tenant": st.sampled_from(TENANTS),
            "allotted_time": st.sampled_from([None, None, None, 10, 40]),
            "cache_salt": st.sampled_from([None, None, 1]),
            "adapter_id": st.sampled_from([None, None, 0, 1, 2]),
            "held": st.sampled_from([None, None, None, WaitCode.GRAMMAR]),
        }
    ),
    min_size=1,
    max_size=6,
)


class SchedulerMachine(RuleBasedStateMachine):
    """Operations in any order; `SchedulerModel` checks."""

    model: SchedulerModel

    @initialize(
        limits=limits,
        pool_tokens=st.integers(24, 80),
        tokens_per_block=st.sampled_from([1, 2, 4, 8]),
        enable_block_reuse=st.booleans(),
        min_rows=st.sampled_from([1, 2]),
        max_steps_in_flight=st.sampled_from([1, 2]),
        chunk_unit_size=st.sampled_from([1, 2, 4]),
        max_pauses=st.integers(1, 2),
    )
    def begin(
        self,
        limits: dict[str, object],
        pool_tokens: int,
        tokens_per_block: int,
        enable_block_reuse: bool,
        min_rows: int,
        max_steps_in_flight: int,
        chunk_unit_size: int,
        max_pauses: int,
    ) -> None:
        config = BatchManagerConfig(
            **limits,  # type: ignore[arg-type]
            min_rows_per_sequence=min_rows,
            max_steps_in_flight=max_steps_in_flight,
            chunk_unit_size=chunk_unit_size,
            max_pauses_per_request=max_pauses,
            num_adapter_pages=10,
        )
        self.model = SchedulerModel(
            config, KvCacheConfig(pool_tokens // tokens_per_block, tokens_per_block, enable_block_reuse)
        )
        self.num_added = 0

    @rule(arrivals=arrivals)
    def add(self, arrivals: list[dict[str, Any]]) -> None:
        for fields in arrivals:
            held, prefix = fields.pop("held"), fields.pop("prefix")
            lengths = fields.pop("prefix_length"), fields.pop("own_length")
            prompt = [(1 + prefix + position) % VOCABULARY for position in range(lengths[0])]
            prompt += [(self.num_added * 7 + position * 3) % VOCABULARY for position in range(lengths[1])]
            request = Request(
                self.num_added,
                prompt or [prefix],
                end_id=STOP,
                arrival_time=self.model.clock.now,
                adapter_pages=6,
                **fields,
            )
            with suppress(RequestRefused):
                self.model.add(request, held)
                self.num_added += 1

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.model.cancel(data.draw(st.sampled_from(list(self.model.requests.values()))))

    @rule(count=st.integers(1, 20))
    def run(self, count: int) -> None:
        """Several iterations, with as many in flight as may be."""
        for _ in range(count):
            self.model.advance(1.0)
            if len(self.model.in_flight) < self.model.config.max_steps_in_flight:
                self.model.schedule()
            if len(self.model.in_flight) == self.model.config.max_steps_in_flight:
                self.model.update()
            self.model.check_books()

    @precondition(lambda self: len(self.model.in_flight) < self.model.config.max_steps_in_flight)
    @rule()
    def schedule(self) -> None:
        self.model.schedule()

    @precondition(lambda self: self.model.in_flight)
    @rule()
    def update(self) -> None:
        self.model.update()

    @precondition(lambda self: self.model.in_flight)
    @rule()
    def fail(self) -> None:
        self.model.abandon()

    @rule(limits=limits)
    def change(self, limits: dict[str, object]) -> None:
        self.model.manager.change_config(replace(self.model.config, **limits))

    @rule(operation=st.sampled_from(["resume", "pause", "drain"]), num_iterations=st.integers(0, 5))
    def operate(self, operation: str, num_iterations: int) -> None:
        getattr(self.model, operation)()
        self.run(num_iterations)
        self.model.resume()
        self.model.release_holds()

    @invariant()
    def books_are_right(self) -> None:
        self.model.check_books()

    def teardown(self) -> None:
        """Whatever happened, all that is left runs to its end in a bounded number of iterations."""
        if not hasattr(self, "model"):
            return
        model = self.model
        model.resume()
        model.release_holds()
        bound = model.num_iterations + 10 + sum(60 + 60 * (3 + request.num_pauses) for request in model.live)
        while model.live or model.in_flight:
            if len(model.in_flight) < model.config.max_steps_in_flight:
                model.schedule()
            if model.in_flight:
                model.update()
            model.advance(1.0)
            assert model.num_iterations <= bound
        model.check_books()


def test_the_invariants_hold_under_any_order_of_operations() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.long
def test_the_invariants_hold_under_many_orders_of_operations() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=5000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
