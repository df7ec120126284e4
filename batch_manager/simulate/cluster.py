"""Several instances in virtual time: requests are routed, and where roles are parted, move between them.

```
                  router                  router
 arrivals ──────────► CONTEXT instance ─────────► GENERATION instance ──► rest of the tokens
              │        prompt, first token  │       holds it until its keys and values have come
              │                             └── network: what is not cached there
              └─────► BOTH instance: all tokens
```
The blocks of a finished context are leased until the transfer has ended. When an instance dies, its requests are routed
again, with what they have generated as part of their prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batch_manager.errors import RequestRefused
from batch_manager.kv import KvCacheManager
from batch_manager.request import FinishReason, Request
from batch_manager.simulate.cluster_metrics import ClusterMetrics
from batch_manager.simulate.errors import SimulationError
from batch_manager.simulate.instance import SimulatedInstance
from batch_manager.simulate.member import Flow, InstanceSpec, Member, Role
from batch_manager.simulate.metrics import RunMetrics
from batch_manager.simulate.network import Network, NetworkFigures
from batch_manager.simulate.receiving import ReceivingKvCacheManager
from batch_manager.simulate.routing import RouterPolicy, make_router
from batch_manager.simulate.simulator import MAX_BACKLOG, out_of_order, stalled
from batch_manager.simulate.workload import OfferedRequest
from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.observed import Observer


@dataclass(frozen=True, slots=True)
class Death:
    """An instance ends without a word."""

    time: float
    """Seconds."""
    instance: int
    """Its number, from 0."""


class Cluster:
    """One run of several instances on one clock.

    Args:
        instances: at least one that begins requests and one that generates.
        kv_bytes_per_token: what a token's keys and values take on the network.
        network: links between the instances.
        router: how instances are chosen, for contexts and for the generation after them.
        metrics: counts the run.
        deaths: when which instances end.
        observers: for each instance, who else watches it; none by default.

    Raises:
        SimulationError: a role is missing, or an instance that could not do its part.
    """

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        kv_bytes_per_token: float,
        network: NetworkFigures | None = None,
        router: RouterPolicy = RouterPolicy.KV_AWARE,
        metrics: ClusterMetrics | None = None,
        deaths: Sequence[Death] = (),
        observers: Sequence[Sequence[Observer]] = (),
    ) -> None:
        if not 0 <= kv_bytes_per_token < math.inf:
            raise SimulationError(f"kv_bytes_per_token is {kv_bytes_per_token}; it must be at least 0 and finite")
        if observers and len(observers) != len(instances):
            raise SimulationError(f"observers for {len(observers)} instances are given, but there are {len(instances)}")
        for death in deaths:
            if not 0 <= death.instance < len(instances):
                raise SimulationError(f"instance {death.instance} is to die; there are 0 to {len(instances) - 1}")
        self.metrics = metrics or ClusterMetrics()
        self.num_held_back = 0
        """Requests that were routed later than they arrived, see `MAX_BACKLOG`."""
        self._clock = ManualClock()
        self._network = Network(network or NetworkFigures())
        self._kv_bytes_per_token = kv_bytes_per_token
        self._routers = {True: make_router(router), False: make_router(router)}
        """For contexts, for generation."""
        self.members = [
            self._make_member(number, spec, observers[number] if observers else ())
            for number, spec in enumerate(instances)
        ]
        self._deaths = sorted(deaths, key=lambda death: death.time)
        self._next: OfferedRequest | None = None
        self._num_offered = 0
        self._stopped_at = -math.inf
        self._pool(True)
        if any(member.role is Role.CONTEXT for member in self.members):
            self._pool(False)

    def _make_member(self, number: int, spec: InstanceSpec, observers: Sequence[Observer]) -> Member:
        clock = InstantClock(self._clock)
        kv: KvCacheManager | None = None
        if spec.kv_config is not None:
            kv = ReceivingKvCacheManager(
                spec.kv_config, clock, lambda request, num_missing: self._on_room(member, request, num_missing)
            )
        elif spec.role is not Role.BOTH:
            raise SimulationError(f"instance {number} ({spec.role}) has no KV cache; only {Role.BOTH} goes without one")
        metrics = RunMetrics(self.metrics.service_level)
        instance = SimulatedInstance(spec.config, kv, spec.cost, self._clock, clock, [metrics, *observers])
        member = Member(number, spec.role, instance, kv, metrics)
        return member

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def run(self, offered: Iterable[OfferedRequest]) -> None:
        """Offer requests, by arrival time, and run until all have ended.

        Raises:
            SimulationError: arrivals are out of order, or no instance is left for a request.
            SimulationStalledError: requests wait for something that will never come.
        """
        source = iter(offered)
        self._next = next(source, None)
        while True:
            self._end_steps()
            self._land()
            self._die()
            self._feed(source)
            while awake := [member for member in self.members if self._is_due(member)]:
                for member in awake:
                    self._wake(member)
            times = [time for time in self._times() if time is not None]
            if not times:
                break
            self._clock.now = max(self.now, min(times))
        for member in self.members:
            if member.is_alive and member.flows:
                raise stalled(self.now, member.instance.manager)

    def _times(self) -> Iterator[float | None]:
        """When something happens next, each kind of thing that can."""
        for member in self.members:
            if member.is_alive:
                end = member.instance.end_of_step
                yield member.instance.next_event if end is None else end
        yield self._network.next_event
        if self._next is not None:
            yield self._next.arrival_time if self._next.arrival_time > self.now else None
        if self._deaths and (self._next is not None or any(member.flows for member in self.members)):
            yield self._deaths[0].time

    def _is_due(self, member: Member) -> bool:
        """Whether it has something to plan for now."""
        if not member.is_alive or member.is_touched:
            return member.is_alive
        event = member.instance.next_event
        return member.instance.end_of_step is None and event is not None and event <= self.now

    # Arrivals

    def _feed(self, source: Iterator[OfferedRequest]) -> None:
        """Route all that has arrived by now."""
        while self._next is not None and self._next.arrival_time <= self.now:
            if not any(self._may_take(member) for member in self._pool(True)):
                self._stopped_at = self.now
                return
            self.num_held_back += self._next.arrival_time <= self._stopped_at
            flow = Flow(self._num_offered, self._next)
            self._num_offered += 1
            self.metrics.on_arrival(flow)
            self._begin(flow)
            previous, self._next = self._next, next(source, None)
            if self._next is not None and self._next.arrival_time < previous.arrival_time:
                raise out_of_order(self._num_offered, self._next, previous)

    def _may_take(self, member: Member) -> bool:
        return member.instance.manager.config.max_queued_requests is not None or member.backlog < MAX_BACKLOG

    def _pool(self, begins: bool) -> list[Member]:
        """The living that begin requests, or that go on with begun ones."""
        roles = (Role.CONTEXT if begins else Role.GENERATION, Role.BOTH)
        members = [member for member in self.members if member.is_alive and member.role in roles]
        if not members:
            raise SimulationError(
                f"at {self.now} s no instance is there that {'begins' if begins else 'goes on with'} requests; "
                f"roles {roles[0]} and {roles[1]} do"
            )
        return members

    def _begin(self, flow: Flow) -> None:
        """Send it to where its prompt is computed."""
        probe = flow.probe()
        member = self._routers[True].choose(probe, self._pool(True))
        flow.is_split = member.role is Role.CONTEXT
        self._send(member, flow, len(probe.token_ids) - member.num_cached_tokens(probe))

    def _send(self, member: Member, flow: Flow, num_pending_tokens: int) -> None:
        member.send(flow, num_pending_tokens)
        member.is_touched |= member.instance.end_of_step is None

    # Steps

    def _wake(self, member: Member) -> None:
        """Look at what has been sent, then plan."""
        member.is_touched = False
        while member.inbox:
            self._take_in(member, member.inbox.popleft())
        for request_id in member.instance.cancel_due():
            self._end(member, request_id, FinishReason.CANCELLED)
        for request in member.instance.plan():
            self._end(member, request.request_id, FinishReason.TIMED_OUT)

    def _take_in(self, member: Member, flow: Flow) -> None:
        try:
            request = member.instance.add(flow.request_id, flow.part())
        except RequestRefused as refusal:
            self.metrics.on_refusal(flow, refusal.reason.value)
            self._end_lease(flow)
            member.leave(flow)
            return
        member.requests[flow.request_id] = request
        if flow.source is not None:
            member.receiver.expect(flow.request_id)

    def _end_steps(self) -> None:
        for member in self.members:
            end = member.instance.end_of_step
            if member.is_alive and end is not None and end <= self.now:
                self._end_step(member)
                member.is_touched = True

    def _end_step(self, member: Member) -> None:
        leases = self._lease_finishing(member)
        for request, new_token_ids, reason, _ in member.instance.end_step():
            flow = member.flows[request.request_id]
            member.on_token(flow)
            self.metrics.on_tokens(flow, len(new_token_ids), self.now)
            if request.request_id in leases:
                self._hand_over(member, flow, leases[request.request_id])
            elif reason is not FinishReason.NOT_FINISHED:
                self._end(member, request.request_id, reason)
        self.metrics.last_event = self.now

    def _lease_finishing(self, member: Member) -> dict[int, int]:
        """Leases on the blocks of contexts that end with this step and go on elsewhere, by request id."""
        if member.role is not Role.CONTEXT:
            return {}
        return {
            entry.request.request_id: member.receiver.lease(entry.request, "transfer")
            for entry in member.instance.oldest_plan.scheduled
            if entry.samples
            and entry.request.request_id in member.flows
            and member.flows[entry.request.request_id].goes_on_elsewhere
        }

    def _hand_over(self, member: Member, flow: Flow, lease_id: int) -> None:
        """The context has ended: generation goes on where the router says."""
        request = member.leave(flow)
        self._count(request)
        flow.go_on_from(request)
        flow.is_split = False
        flow.source = member, lease_id
        self._send(self._routers[False].choose(flow.probe(), self._pool(False)), flow, 0)

    # Transfers

    def _on_room(self, member: Member, request: Request, num_missing: int) -> None:
        """An expected request has its blocks at `member`."""
        flow = member.flows[request.request_id]
        assert flow.source is not None
        if not num_missing:
            member.receiver.arrived(request.request_id)
            self._end_lease(flow)
            return
        num_bytes = num_missing * self._kv_bytes_per_token
        sender = flow.source[0].number
        flow.transfer = self._network.begin(self.now, request.request_id, sender, member.number, num_bytes)

    def _land(self) -> None:
        for transfer in self._network.take_arrived(self.now):
            member = self.members[transfer.target]
            flow = member.flows[transfer.request_id]
            self.metrics.transfer.add(self.now - transfer.begin)
            self.metrics.num_transferred_bytes += transfer.num_bytes
            flow.transfer = None
            self._end_lease(flow)
            member.receiver.arrived(transfer.request_id)
            member.is_touched |= member.instance.end_of_step is None

    def _end_lease(self, flow: Flow) -> None:
        """Nothing of the request's keys and values is wanted any more from where its context was computed."""
        if flow.transfer is not None:
            self._network.drop(self.now, flow.transfer)
            flow.transfer = None
        if flow.source is not None:
            sender, lease_id = flow.source
            flow.source = None
            if sender.is_alive:
                sender.receiver.end_lease(lease_id)
                sender.is_touched |= sender.instance.end_of_step is None

    # Ends

    def _end(self, member: Member, request_id: int, reason: FinishReason) -> None:
        flow = member.flows[request_id]
        if flow.source is not None:
            member.receiver.lose(request_id)
            self._end_lease(flow)
        self._count(member.leave(flow))
        self.metrics.on_end(flow, reason, self.now)

    def _count(self, request: Request | None) -> None:
        """The request will not be seen again by its instance."""
        if request is not None:
            receipt = request.receipt
            self.metrics.num_computed_tokens += receipt.num_computed_tokens
            self.metrics.num_reused_tokens += receipt.num_reused_tokens
            self.metrics.num_transferred_tokens += receipt.num_transferred_tokens

    def _die(self) -> None:
        while self._deaths and self._deaths[0].time <= self.now:
            dead = self.members[self._deaths.pop(0).instance]
            if not dead.is_alive:
                continue
            dead.is_alive = False
            for member in self.members:
                if member.is_alive:
                    self._lose_sender(member, dead)
            for flow in list(dead.flows.values()):
                self._end_lease(flow)
                request = dead.leave(flow)
                flow.go_on_from(request)
                self.metrics.on_death(request)
                self._begin(flow)
            dead.inbox.clear()

    def _lose_sender(self, member: Member, dead: Member) -> None:
        """What was to come from `dead` will not: `member` computes it itself."""
        for flow in member.flows.values():
            if flow.source is not None and flow.source[0] is dead:
                self.metrics.num_lost_transfers += 1
                self._end_lease(flow)
                if lost := member.receiver.lose(flow.request_id):
                    member.instance.manager.restart(lost)
                member.is_touched |= member.instance.end_of_step is None
