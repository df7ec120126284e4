"""The loop `schedule -> compute -> update -> respond`, in a thread of its own.

```
caller's threads                 the loop's thread
submit ──┐ lock                  ┌► cancels, grammars, schedule  (under the lock: the BatchManager is not thread-safe)
cancel ──┤ BatchManager's queue  │  submit, prepare, wait, draw  (without it: callers are never held up by the engine)
grammar ─┘                       │  update                       (under the lock)
                                 └─ responses to listeners       (without it)
```
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from batch_manager import (
    BatchManager,
    FinishReason,
    IterationPlan,
    PlanningFailedError,
    Progress,
    Request,
    RequestRefused,
    WaitCode,
)
from executor.api.errors import EngineStepError, ExecutorShutDownError, RequestError
from executor.guided_decoding import with_grammar
from executor.kv_upkeep import KvUpkeep
from executor.live_request import LiveRequest, LiveSequence
from executor.live_requests import LiveRequests
from executor.receipts import Receipts
from executor.request_intake import Submission
from executor.sampling import SampledSequence, SamplingSpec
from executor.speculation import Drafter
from executor.stats import IterationTimes, StatsRecorder
from executor.step import Step
from executor.transfer.handover import Handover

if TYPE_CHECKING:
    from executor.sampling.grammar import CompiledGrammar

_logger = logging.getLogger(__name__)

_IDLE_TICK = 0.05
"""Seconds between looks at the queue while nothing can be scheduled: deadlines are kept without new traffic."""


class ExecutorLoop:
    """Owns the BatchManager, the upkeep of its KV cache, the step and the drafter; nothing else touches them."""

    def __init__(
        self,
        batch_manager: BatchManager,
        kv_upkeep: KvUpkeep,
        step: Step,
        drafter: Drafter,
        stats: StatsRecorder,
        receipts: Receipts,
        handover: Handover,
    ) -> None:
        self._batch_manager = batch_manager
        self._kv_upkeep = kv_upkeep
        self._step = step
        self._drafter = drafter
        self._stats = stats
        self._handover = handover
        self._changed = threading.Condition()
        self._has_news = False
        """Whether callers have done anything, or KV blocks have arrived, since the loop last looked."""
        self._is_busy = False
        """Whether a request was live when the loop last looked."""
        self._live = LiveRequests(self._close, receipts)
        self._to_open: list[tuple[LiveSequence, SamplingSpec]] = []
        self._to_cancel: list[int] = []
        self._grammars: list[tuple[LiveRequest, list[SamplingSpec] | RequestError]] = []
        """Of requests that have waited for theirs: how they are sampled, or why they fail."""
        self._iteration = 0
        self._stopping = False
        self._stop_reason = "the executor is shutting down"
        self.last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="executor-loop", daemon=True)

    def start(self) -> None:
        self._kv_upkeep.start(self.wake)
        self._thread.start()

    # -- called from any thread -------------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Hand over requests; all of their sequences are taken, or none.

        Raises:
            RequestRefused: the BatchManager's reason (it can never fit, the queue is full, ...).
            ExecutorShutDownError: the loop is stopping.
        """
        with self._changed:
            if self._stopping:
                raise ExecutorShutDownError(self._stop_reason)
            self._enqueue(submissions)
            for live, specs, grammar in submissions:
                self._live.add(live)
                self._handover.expect(live)
                if grammar is None:
                    self._to_open += zip(live.sequences, specs, strict=True)
            self._notify()
        for live, specs, grammar in submissions:
            if grammar is not None:
                grammar.add_done_callback(partial(self._take_grammar, live, specs))

    def _enqueue(self, submissions: Sequence[Submission]) -> None:
        added: list[int] = []
        try:
            for live, _, grammar in submissions:
                held_for = None if grammar is None else WaitCode.GRAMMAR
                if held_for is None and self._handover.looks_up(live):
                    held_for = WaitCode.REMOTE_KV
                for sequence in live.sequences:
                    self._batch_manager.add_request(sequence.scheduled, held_for)
                    added.append(sequence.scheduled.request_id)
                if held_for is WaitCode.REMOTE_KV:
                    self._handover.look_up(live)
        except RequestRefused:
            for sequence_id in added:
                self._batch_manager.cancel_request(sequence_id)
            raise

    def _take_grammar(self, live: LiveRequest, specs: list[SamplingSpec], grammar: Future[CompiledGrammar]) -> None:
        """A grammar is ready, or never will be. Called on the thread that compiled it."""
        outcome: list[SamplingSpec] | RequestError
        if grammar.cancelled():
            outcome = ExecutorShutDownError(self._stop_reason)
        else:
            try:
                outcome = with_grammar(specs, grammar)
            except RequestError as error:
                outcome = error
            except Exception as error:  # foreign code; whatever it is, it concerns this request only
                _logger.exception("the grammar of request %d cannot be compiled", live.request_id)
                outcome = RequestError(f"the grammar cannot be compiled: {error}", field="guided_decoding_params")
        with self._changed:
            self._grammars.append((live, outcome))
            self._notify()

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; one that has ended, or never was, is left alone."""
        with self._changed:
            if request_id in self._live.by_id:
                self._to_cancel.append(request_id)
                self._notify()

    @property
    def num_unfinished(self) -> int:
        """Requests whose final response nobody has heard of yet."""
        return self._live.num_unfinished

    @property
    def batch_manager_lock(self) -> threading.Condition:
        """Hold it to look into the BatchManager, or to change its limits, from another thread. Notified after each
        iteration."""
        return self._changed

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """End every request with `ExecutorShutDownError` and stop; returns when the thread has ended."""
        with self._changed:
            self._stopping = True
            self._notify()
        if self._thread.ident is not None:
            self._thread.join()

    def wake(self) -> None:
        """Let the loop look again, at once if it waits."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    # -- the loop's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the executor was shut down"
        try:
            while self._wait_for_work():
                self._iterate()
                self._live.send()
        except Exception as error:  # a fault of the scheduler itself: nobody may be left waiting for an answer
            _logger.exception("the executor's loop ends after a fault that it cannot recover from")
            reason = f"the executor stopped after an internal fault ({error!r})"
        with self._changed:
            self._stopping = True
            self._stop_reason = reason
            for live in list(self._live.by_id.values()):
                self._fail_request(live, ExecutorShutDownError(f"{reason} before the request ended"))
            self._changed.notify_all()
        self._live.send()

    def _wait_for_work(self) -> bool:
        with self._changed:
            if self._is_busy and not self._batch_manager.has_work:
                self._kv_upkeep.on_idle()
            self._changed.wait_for(lambda: self._stopping or self._has_news or self._batch_manager.has_work)
            self._has_news = False
            self._is_busy = self._batch_manager.has_work
            return not self._stopping

    def _iterate(self) -> None:
        started = time.monotonic()
        with self._changed:
            self._end_cancelled()
            self._release_held()
            self._kv_upkeep.acknowledge()
            self._handover.settle(self._live.sequences)
            plan = self._plan()
            self._kv_upkeep.order()
            self._handover.begin()
            to_open, self._to_open = self._to_open, []
        for sequence, spec in to_open:
            self._open(sequence, spec)
        if plan is None:
            return
        for timed_out in plan.timed_out:
            self._live.finish(self._live.sequences[timed_out.request_id], FinishReason.TIMED_OUT, plan.iteration)
        if plan.is_empty:
            self._wait_while_blocked()
            return
        scheduled = [self._live.sequences[item.request.request_id] for item in plan.scheduled]
        new = [sequence for sequence in scheduled if sequence.note_scheduled(plan.iteration, started)]
        try:
            sampled, engine_seconds = self._step.compute(plan)
            self._handover.note_step(plan, engine_seconds)
            self._fail_undrawn(plan, sampled)
            with self._changed:
                self._stats.record_rows(plan)
                self._handover.keep(plan)
                progress = self._batch_manager.update(plan, [draws.token_ids for draws in sampled])
                self._kv_upkeep.order()
                self._handover.offer(self._live.sequences)
        except Exception as error:  # whatever is raised on the way, it fails this batch and not the loop
            _logger.exception("iteration %d failed; its %d requests end", plan.iteration, len(scheduled))
            with self._changed:
                self._batch_manager.abandon(plan)
                self._handover.abandon()
            self._fail(scheduled, error)
            return
        try:
            self._drafter.learn_step(plan, engine_seconds)
            draft_seconds = self._hand_on(plan, sampled, progress)
        except Exception as error:  # as above; here the BatchManager has got over the iteration
            _logger.exception("the results of iteration %d are lost; its requests end", plan.iteration)
            self._fail(scheduled, error)
            return
        self.last_progress = time.monotonic()
        times = IterationTimes(self.last_progress - started, engine_seconds, draft_seconds)
        with self._changed:
            self._stats.record(plan, progress, times, new, self._live.num_ended_sequences)
            self._changed.notify_all()

    def _plan(self) -> IterationPlan | None:
        """The next iteration; `None` where planning it failed and the requests that were to be in it have ended."""
        try:
            plan = self._batch_manager.schedule()
        except PlanningFailedError as error:
            if not error.ended:
                raise  # nothing has changed, so it would fail again for ever
            _logger.exception("an iteration could not be planned; its %d requests end", len(error.ended))
            ended = [self._live.sequences[request.request_id] for request in error.ended]
            self._fail(ended, error)
            return None
        self._iteration = plan.iteration
        return plan

    def _wait_while_blocked(self) -> None:
        """Nothing can run now: wait for callers, or for the time of the next look."""
        self._live.send()
        with self._changed:
            if self._batch_manager.has_work:
                self._changed.wait_for(lambda: self._has_news, _IDLE_TICK)

    def _open(self, sequence: LiveSequence, spec: SamplingSpec) -> None:
        sequence_id = sequence.scheduled.request_id
        if sequence_id not in self._live.sequences:
            return
        try:
            self._step.open(sequence, spec)
            lookahead = sequence.request.request.lookahead_config
            if lookahead is not None:
                self._drafter.open(sequence_id, lookahead)
        except Exception as error:  # it fails this request, and neither its batch nor the loop
            _logger.exception("request %d cannot begin", sequence.request.request_id)
            self._step.refuse(sequence_id, EngineStepError(f"the request cannot begin: {error}"))

    def _close(self, sequence_id: int) -> None:
        self._step.close(sequence_id)
        self._drafter.close(sequence_id)
        self._handover.forget(sequence_id)

    def _end_cancelled(self) -> None:
        to_cancel, self._to_cancel = self._to_cancel, []
        for request_id in to_cancel:
            live = self._live.by_id.get(request_id)
            for sequence in live.sequences if live is not None else ():
                if self._batch_manager.cancel_request(sequence.scheduled.request_id):
                    self._live.finish(sequence, FinishReason.CANCELLED, self._iteration)

    def _release_held(self) -> None:
        """Requests whose grammars have come stand in line, those whose grammars will not come fail."""
        grammars, self._grammars = self._grammars, []
        for live, outcome in grammars:
            if isinstance(outcome, RequestError):
                self._fail_request(live, outcome)
                continue
            for sequence, spec in zip(live.sequences, outcome, strict=True):
                sequence_id = sequence.scheduled.request_id
                if sequence_id in self._live.sequences:
                    self._batch_manager.release_hold(sequence_id)
                    self._to_open.append((sequence, spec))

    def _fail_undrawn(self, plan: IterationPlan, sampled: list[SampledSequence]) -> None:
        """End the requests for which no token could be drawn, each with its own error."""
        for item, draws in zip(plan.scheduled, sampled, strict=True):
            sequence = self._live.sequences.get(item.request.request_id)
            if draws.error is not None and sequence is not None:
                self._fail_request(sequence.request, draws.error)

    def _hand_on(self, plan: IterationPlan, sampled: list[SampledSequence], progress: list[Progress]) -> float:
        """Results to the sequences, to statistics, to clients and to the drafter; returns the seconds for drafts."""
        self._take_in(plan, sampled, progress)
        with self._changed:
            self._stats.record_requests(plan, self._live.sequences.values())
        self._respond(progress, plan.iteration)
        return self._propose_drafts(progress)

    def _take_in(self, plan: IterationPlan, sampled: list[SampledSequence], progress: list[Progress]) -> None:
        now = time.monotonic()
        drawn = {
            item.request.request_id: (item.num_draft_tokens, draws)
            for item, draws in zip(plan.scheduled, sampled, strict=True)
        }
        for made in progress:
            sequence = self._live.sequences.get(made.request.request_id)
            if sequence is not None:
                num_drafts, draws = drawn[made.request.request_id]
                sequence.note_tokens(draws, len(made.new_token_ids), num_drafts, now)

    def _respond(self, progress: list[Progress], iteration: int) -> None:
        for made in progress:
            sequence = self._live.sequences.get(made.request.request_id)
            if sequence is None:
                continue
            if made.finish_reason is FinishReason.NOT_FINISHED:
                self._live.progress(sequence, iteration)
            else:
                sequence.context_phase_params = self._handover.params(sequence, self._draft_for_another)
                self._live.finish(sequence, made.finish_reason, iteration)

    def _draft_for_another(self, request: Request) -> list[int]:
        """What may follow the tokens of a context-only request that has ended."""
        return self._drafter.propose(request.request_id, request.token_ids, num_sequences=1)

    def _propose_drafts(self, progress: list[Progress]) -> float:
        """Give the sequences that go on their drafts; returns the seconds it took."""
        started = time.monotonic()
        going_on = [made.request for made in progress if not made.request.is_finished]
        for request in going_on:
            drafts = self._drafter.propose(request.request_id, request.token_ids, num_sequences=len(going_on))
            room = request.max_num_tokens - len(request.token_ids) - 1
            request.draft_token_ids = drafts[: max(0, room)]
        return time.monotonic() - started

    def _fail(self, sequences: list[LiveSequence], error: Exception) -> None:
        """Every request of a batch ends with an error; the others know nothing of it."""
        for sequence in sequences:
            self._fail_request(sequence.request, EngineStepError(f"the engine failed on this request's batch: {error}"))

    def _fail_request(self, live: LiveRequest, error: RequestError) -> None:
        with self._changed:
            for sequence in live.sequences:
                self._batch_manager.cancel_request(sequence.scheduled.request_id)
            self._live.fail(live, error)
