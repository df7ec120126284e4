"""The BatchManager: decides, iteration by iteration, which requests run and with how many tokens.

```
 add_request ─► waiting ──admit──► running ──► finished
                  ▲                  │
                  └───── pause ◄─────┘
 schedule() ─► IterationPlan ─► (engine) ─► update(plan, sampled) ─► [Progress]
```
Pure bookkeeping: no thread, no engine, no I/O. Calls must not overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from batch_manager.admission import Admission
from batch_manager.block_accounts import BlockAccounts, NoBlocks, PagedBlocks
from batch_manager.commit import commit
from batch_manager.config import BatchManagerConfig, CapacitySchedulerPolicy
from batch_manager.errors import InvalidConfigError, PlanningFailedError, StepOrderError, UnknownRequestError
from batch_manager.explain import Explainer
from batch_manager.intake import check_change, check_request
from batch_manager.kv import KvCacheManager
from batch_manager.lifecycle import Lifecycle
from batch_manager.micro_batch import Growth, MicroBatch, Stalled
from batch_manager.plan import IterationPlan, Progress
from batch_manager.policies.capacity import make_capacity
from batch_manager.policies.chunking import make_chunking
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.request import FinishReason, Request, RequestState
from batch_manager.speculation import SpeculationStats


class BatchManager:
    """In-flight batching: requests join and leave the batch at every iteration.

    Args:
        config: limits and policies.
        kv: the blocks; None only with `MAX_REQUESTS`.
        clock: seconds, for deadlines, ageing and receipts. Arrival times of requests are on the same clock.
    """

    def __init__(
        self,
        config: BatchManagerConfig,
        kv: KvCacheManager | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (kv is None) != (config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_REQUESTS):
            raise InvalidConfigError(
                f"capacity_scheduler_policy is {config.capacity_scheduler_policy.name} "
                f"{'without' if kv is None else 'with'} a KV cache; MAX_REQUESTS goes without one, the others with one"
            )
        blocks: BlockAccounts = NoBlocks() if kv is None else PagedBlocks(kv, config.max_pauses_per_request)
        self.config = config
        self.speculation = SpeculationStats()
        self._clock = clock
        self._life = Lifecycle(config, blocks)
        self._growth = Growth(self._life.require, self._life.try_cover)
        self._chunking = make_chunking(config.context_chunking_policy, config.enable_chunked_context)
        self._admission = Admission(
            config, self._life, make_capacity(config.capacity_scheduler_policy, self._life.governor)
        )
        self._in_flight: deque[IterationPlan] = deque()
        self._stalled: list[Stalled] = []
        self._is_paused = False

    # Requests

    def add_request(self, request: Request, held_for: WaitCode | None = None) -> None:
        """Take a request in.

        Args:
            request: not used before.
            held_for: what it has to wait for besides its turn (`GRAMMAR`, `REMOTE_KV`): it is not looked at before
                `release_hold`.

        Raises:
            RequestRefused: it cannot be taken in, for the reason and with the numbers given; nothing has changed.
        """
        check_request(request, self.config, self._life)
        self._life.arrive(request, None if held_for is None else WaitReason(held_for, 1, 0))

    def release_hold(self, request_id: int) -> None:
        """What a request was held for is there: it stands in line, at its own place.

        Raises:
            UnknownRequestError: there is no live request of this id.
            StepOrderError: it is not held.
        """
        request = self._live_request(request_id)
        if request.parked is None or request.parked.code not in (WaitCode.GRAMMAR, WaitCode.REMOTE_KV):
            raise StepOrderError(f"request {request_id} is not held; release_hold goes with add_request(held_for=...)")
        self._life.wake([request])

    def restart(self, requests: Iterable[Request]) -> None:
        """Blocks of these running requests were lost on their way from a lower tier
        (`KvCacheManager.acknowledge_transfer` returned them) or from another instance: they stand in line again, at
        their own place, and compute them.
        """
        self._life.now = self._clock()
        for request in requests:
            self._life.restart(request)
        self._life.sweep()

    def _live_request(self, request_id: int) -> Request:
        request = self._life.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(request_id)
        return request

    def cancel_request(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a live request at once, in any state; False: there is no live request of this id.

        What a step in flight samples for it is dropped, and its blocks are handed out only after that step.
        """
        request = self._life.requests.get(request_id)
        if request is None:
            return False
        self._life.now = self._clock()
        self._life.finish(request, reason)
        self._life.sweep()
        return True

    @property
    def has_work(self) -> bool:
        """Whether there is a live request."""
        return bool(self._life.requests)

    @property
    def num_waiting(self) -> int:
        """Live requests that hold no blocks, paused ones included."""
        return self._life.waiting.num_requests

    @property
    def num_running(self) -> int:
        return len(self._life.running)

    def explain(self, request_id: int) -> WaitReason | None:
        """Why a request waits, or why it did not advance in the last iteration; None: it did.

        Raises:
            UnknownRequestError: there is no live request of this id.
        """
        return self._explainer().reason(self._live_request(request_id))

    def explain_all(self) -> dict[int, WaitReason]:
        """The reasons of all requests that have one, by id."""
        explainer = self._explainer()
        reasons = {request_id: explainer.reason(request) for request_id, request in self._life.requests.items()}
        return {request_id: reason for request_id, reason in reasons.items() if reason is not None}

    def _explainer(self) -> Explainer:
        return Explainer(self._life, self._admission, self._stalled, self._is_paused)

    # Changes while running

    def pause(self) -> None:
        """Plan nothing until `resume`; requests keep their blocks, deadlines go on."""
        self._is_paused = True

    def drain(self) -> None:
        """Let what has been started end, paused requests included, and start nothing until `resume`."""
        self._life.waiting.drain()

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self._is_paused = False
        self._life.waiting.resume(self._life.requests.values())

    @property
    def is_drained(self) -> bool:
        """Whether, after `drain`, nothing that was started is left."""
        return self._life.waiting.is_draining and not self._life.running and not self._life.waiting.has_line

    def change_config(self, config: BatchManagerConfig) -> None:
        """Go on with other limits and policies; nothing that is running or in flight is lost.

        Args:
            config: `dataclasses.replace(manager.config, ...)` of the fields in `LIVE_FIELDS`.

        Raises:
            InvalidConfigError: another field differs, or a live request could not run any more; nothing has changed.
        """
        check_change(self.config, config, self._life)
        life, previous = self._life, self.config
        self.config = config
        self._chunking = make_chunking(config.context_chunking_policy, config.enable_chunked_context)
        self._admission = Admission(config, life, make_capacity(config.capacity_scheduler_policy, life.governor))
        if (config.waiting_queue_policy, config.priority_ageing) != (
            previous.waiting_queue_policy,
            previous.priority_ageing,
        ):
            life.reorder(config)
        else:
            life.waiting.queue.reweigh(config.tenant_weights)

    # Iterations

    def schedule(self) -> IterationPlan:
        """Plan the next iteration.

        An empty plan means that nothing can run now; it is not executed, and its number is used again.

        Raises:
            StepOrderError: as many plans are in flight as `max_steps_in_flight` allows.
            PlanningFailedError: something unforeseen; the requests it names have ended, all others live on.
        """
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            raise StepOrderError(
                f"{len(self._in_flight)} iterations are in flight (max_steps_in_flight); update or abandon iteration "
                f"{self._in_flight[0].iteration} first"
            )
        life, config = self._life, self.config
        life.begin_iteration(self._clock(), bool(self._in_flight))
        timed_out = self._expire()
        if self._is_paused:
            return IterationPlan(life.iteration, [], 0, [], [], timed_out)
        is_contended = len(life.requests) > 1
        batch = MicroBatch(config, self._chunking, self._growth, life.blocks.tokens_per_block, is_contended)
        try:
            self._fill(batch)
            scheduled = batch.settle()
        except Exception as error:
            raise PlanningFailedError(self._end_all_in(batch)) from error
        self._stalled = batch.stalled
        plan = IterationPlan(
            life.iteration,
            scheduled,
            config.max_num_tokens - batch.rows_left,
            self._admission.take_copies() if scheduled else [],
            life.paused,
            timed_out,
        )
        if scheduled:
            life.blocks.begin_step(life.iteration)
            life.iteration += 1
            self._in_flight.append(plan)
        return plan

    def _fill(self, batch: MicroBatch) -> None:
        """Put the requests of an iteration together."""
        life = self._life
        num_running_before = len(life.running)
        self._admission.make_room()
        life.serve_protected()
        contexts: list[Request] = []
        batch.add_running(islice(life.running, self.config.max_batch_size), contexts)
        if life.paused:
            life.sweep()
        for request in contexts:
            if request.state is not RequestState.RUNNING:
                continue
            if life.blocks.is_loading(request):
                code = WaitCode.REMOTE_KV if request.num_remote_tokens else WaitCode.KV_LOADING
                batch.stalled.append(Stalled(request, code, 1, 0))
            else:
                batch.add_context(request)
        self._admission.admit(batch, num_running_before)

    def _end_all_in(self, batch: MicroBatch) -> list[Request]:
        """Planning failed: what is in the batch has advanced for nothing, and what was looked at cannot be trusted."""
        candidate = self._admission.candidate
        requests = batch.requests if candidate is None else [*batch.requests, candidate]
        ended = [request for request in dict.fromkeys(requests) if not request.is_finished]
        for request in ended:
            self._life.finish(request, FinishReason.NOT_FINISHED)
        self._life.sweep()
        self._admission.candidate = None
        return ended

    def _expire(self) -> list[Request]:
        life = self._life
        timed_out = []
        while (request := life.timers.pop_expired(life.now)) is not None:
            life.finish(request, FinishReason.TIMED_OUT)
            timed_out.append(request)
        if timed_out:
            life.sweep()
        return timed_out

    def update(self, plan: IterationPlan, sampled: Sequence[Sequence[int]]) -> list[Progress]:
        """Take over what an iteration computed.

        Args:
            plan: the oldest one in flight, or an empty one.
            sampled: for each entry of `plan.scheduled`, the token ids sampled: none where `samples` is False, one
                without drafts, and with drafts those accepted and one more.

        Returns:
            One `Progress` for each live request that got tokens, in the order of the plan.

        Raises:
            StepOrderError: the plan is not the oldest in flight; nothing has changed.
            InvalidSampledTokensError: `sampled` does not fit the plan; nothing has changed.

        After any error the plan is still in flight; `abandon` ends its requests.
        """
        if plan.is_empty:
            return []
        self._check_oldest(plan)
        self._life.now = self._clock()
        progress = commit(plan, sampled, self._life, self.speculation)
        self._end_step(plan)
        return progress

    def _end_step(self, plan: IterationPlan) -> None:
        self._in_flight.popleft()
        self._life.end_step(plan.iteration)

    def abandon(self, plan: IterationPlan) -> list[Request]:
        """An iteration, or its `update`, failed: its live requests end, without a finish reason.

        They give their blocks back, and nothing of what it wrote becomes findable. All other requests live on.

        Returns:
            The requests that ended.

        Raises:
            StepOrderError: the plan is not the oldest in flight; nothing has changed.
        """
        if plan.is_empty:
            return []
        self._check_oldest(plan)
        life = self._life
        life.now = self._clock()
        ended = [entry.request for entry in plan.scheduled if not entry.request.is_finished]
        for request in ended:
            life.finish(request, FinishReason.NOT_FINISHED)
        life.sweep()
        self._end_step(plan)
        return ended

    def _check_oldest(self, plan: IterationPlan) -> None:
        if not self._in_flight:
            raise StepOrderError(f"iteration {plan.iteration} is not in flight: nothing is")
        if self._in_flight[0] is not plan:
            raise StepOrderError(
                f"iteration {plan.iteration} is not the oldest in flight, which is {self._in_flight[0].iteration}"
            )
