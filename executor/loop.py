"""The loop `schedule -> execute -> sample -> update -> respond`, in a thread of its own.

```
caller's threads                 the loop's thread
submit ──┐ lock                  ┌► cancels, schedule          (under the lock: the BatchManager is not thread-safe)
cancel ──┤ BatchManager's queue  │  execute, sample            (without it: callers are never held up by the engine)
         └───────────────────────┤  update                     (under the lock)
                                 └─ responses to listeners     (without it)
```
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from batch_manager import BatchManager, FinishReason, IterationPlan, Progress, RequestRefused
from batch_manager import Request as ScheduledState
from executor.api.errors import EngineStepError, ExecutorShutDownError, RequestError
from executor.api.request import LookaheadDecodingConfig
from executor.api.response import Response
from executor.live_request import LiveRequest, LiveSequence, ResponseListener
from executor.model_runner import ModelRunner
from executor.sampling import SampledRows, SampledSequence, Sampler, SamplingSpec
from executor.speculation import Drafter
from executor.stats import StatsRecorder

_logger = logging.getLogger(__name__)

_IDLE_TICK = 0.05
"""Seconds between looks at the queue while nothing can be scheduled: deadlines are kept without new traffic."""


class ExecutorLoop:
    """Owns the BatchManager, the model runner and the sampler; nothing else touches them."""

    def __init__(
        self,
        batch_manager: BatchManager,
        runner: ModelRunner,
        sampler: Sampler,
        drafter: Drafter,
        stats: StatsRecorder,
    ) -> None:
        self._batch_manager = batch_manager
        self._runner = runner
        self._sampler = sampler
        self._drafter = drafter
        self._stats = stats
        self._changed = threading.Condition()
        self._live: dict[int, LiveRequest] = {}
        self._sequences: dict[int, LiveSequence] = {}
        """By the scheduler's id; a request has one for each of its `num_return_sequences`."""
        self._to_open: list[tuple[int, SamplingSpec, LookaheadDecodingConfig | None]] = []
        self._to_cancel: list[int] = []
        self._outbox: dict[ResponseListener, list[Response]] = {}
        self._iteration = 0
        self._stopping = False
        self._stop_reason = "the executor is shutting down"
        self.last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="executor-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- called from any thread -------------------------------------------------------------------------------------

    def submit(self, live: LiveRequest, sequences: Sequence[tuple[ScheduledState, SamplingSpec]]) -> None:
        """Hand over a request; all of its sequences are taken, or none.

        Raises:
            RequestRefused: the BatchManager's reason (it can never fit, the queue is full, ...).
            ExecutorShutDownError: the loop is stopping.
        """
        with self._changed:
            if self._stopping:
                raise ExecutorShutDownError(self._stop_reason)
            added: list[int] = []
            try:
                for scheduled, _ in sequences:
                    self._batch_manager.add_request(scheduled)
                    added.append(scheduled.request_id)
            except RequestRefused:
                for sequence_id in added:
                    self._batch_manager.cancel_request(sequence_id)
                raise
            for scheduled, spec in sequences:
                self._sequences[scheduled.request_id] = live.add_sequence(scheduled)
                self._to_open.append((scheduled.request_id, spec, live.request.lookahead_config))
            self._live[live.request_id] = live
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; one that has ended, or never was, is left alone."""
        with self._changed:
            if request_id in self._live:
                self._to_cancel.append(request_id)
                self._changed.notify()

    def is_live(self, request_id: int) -> bool:
        with self._changed:
            return request_id in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def batch_manager_lock(self) -> threading.Condition:
        """Hold it to look into the BatchManager, or to change its limits, from another thread."""
        return self._changed

    def stop(self) -> None:
        """End every request with `ExecutorShutDownError` and stop; returns when the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the loop's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the executor was shut down"
        try:
            while self._wait_for_work():
                self._iterate()
                self._send()
        except Exception as error:  # a fault of the scheduler itself: nobody may be left waiting for an answer
            _logger.exception("the executor's loop ends after a fault that it cannot recover from")
            reason = f"the executor stopped after an internal fault ({error!r})"
        with self._changed:
            self._stopping = True
            self._stop_reason = reason
            self._end_all(ExecutorShutDownError(f"{reason} before the request ended"))
        self._send()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._to_cancel or self._batch_manager.has_work)
            return not self._stopping

    def _iterate(self) -> None:
        started = time.monotonic()
        with self._changed:
            self._cancel_requested()
            plan = self._batch_manager.schedule()
            self._iteration = plan.iteration
            to_open, self._to_open = self._to_open, []
        for sequence_id, spec, lookahead in to_open:
            if sequence_id in self._sequences:
                self._sampler.open(sequence_id, spec)
                if lookahead is not None:
                    self._drafter.open(sequence_id, lookahead)
        for timed_out in plan.timed_out:
            self._finish(self._sequences[timed_out.request_id], FinishReason.TIMED_OUT, plan.iteration)
        if plan.is_empty:
            self._send()
            with self._changed:
                if self._batch_manager.has_work and not self._to_cancel and not self._stopping:
                    self._changed.wait(_IDLE_TICK)
            return
        for item in plan.scheduled:
            self._sequences[item.request.request_id].note_scheduled(plan.iteration, started)
        try:
            sampled, engine_seconds = self._compute(plan)
            self._fail_undrawn(plan, sampled)
            with self._changed:
                self._stats.record_rows(plan)
                progress = self._batch_manager.update(plan, [sequence.token_ids for sequence in sampled])
        except Exception as error:  # whatever is raised on the way, it fails this batch and not the loop
            _logger.exception("iteration %d failed; its %d requests end", plan.iteration, len(plan.scheduled))
            self._fail(plan, error)
            return
        self._respond(plan, sampled, progress)
        self._propose_drafts(progress)
        self.last_progress = time.monotonic()
        with self._changed:
            self._stats.record(plan, progress, self.last_progress - started, engine_seconds)

    def _compute(self, plan: IterationPlan) -> tuple[list[SampledSequence], float]:
        started = time.monotonic()
        step = self._runner.execute(plan)
        engine_seconds = time.monotonic() - started
        rows = [
            SampledRows(
                item.request.request_id,
                item.request.token_ids,
                item.request.draft_token_ids[: item.num_draft_tokens],
                logits.start,
                logits.stop - logits.start,
            )
            for item, logits in zip(plan.scheduled, step.rows, strict=True)
            if item.samples
        ]
        drawn = iter(self._sampler.sample(step.logits, rows))
        nothing = SampledSequence(token_ids=[])
        return [next(drawn) if item.samples else nothing for item in plan.scheduled], engine_seconds

    def _fail_undrawn(self, plan: IterationPlan, sampled: list[SampledSequence]) -> None:
        """End the requests for which no token could be drawn, each with its own error."""
        for item, draws in zip(plan.scheduled, sampled, strict=True):
            sequence = self._sequences.get(item.request.request_id)
            if draws.error is not None and sequence is not None:
                self._fail_request(sequence.request, draws.error)

    def _respond(self, plan: IterationPlan, sampled: list[SampledSequence], progress: list[Progress]) -> None:
        now = time.monotonic()
        drawn = {
            item.request.request_id: (item.num_draft_tokens, draws)
            for item, draws in zip(plan.scheduled, sampled, strict=True)
        }
        for made in progress:
            sequence = self._sequences.get(made.request.request_id)
            if sequence is None:
                continue
            num_drafts, draws = drawn[made.request.request_id]
            sequence.note_tokens(draws, len(made.new_token_ids), num_drafts, plan.iteration, now)
            if made.finish_reason is not FinishReason.NOT_FINISHED:
                self._finish(sequence, made.finish_reason, plan.iteration)
            else:
                response = sequence.response(made.finish_reason, plan.iteration, is_final=False)
                if response is not None:
                    self._post(sequence.request, response)

    def _propose_drafts(self, progress: list[Progress]) -> None:
        going_on = [made.request for made in progress if not made.request.is_finished]
        for request in going_on:
            drafts = self._drafter.propose(request.request_id, request.token_ids, num_sequences=len(going_on))
            room = request.max_num_tokens - len(request.token_ids) - 1
            request.draft_token_ids = drafts[: max(0, room)]

    def _cancel_requested(self) -> None:
        to_cancel, self._to_cancel = self._to_cancel, []
        for request_id in to_cancel:
            live = self._live.get(request_id)
            if live is None:
                continue
            for sequence in live.sequences:
                if self._batch_manager.cancel_request(sequence.scheduled.request_id):
                    self._finish(sequence, FinishReason.CANCELLED, self._iteration)

    def _finish(self, sequence: LiveSequence, reason: FinishReason, iteration: int) -> None:
        """A sequence has ended; its request has when it was the last one."""
        live = sequence.request
        live.num_unfinished -= 1
        is_final = live.num_unfinished == 0
        response = sequence.response(reason, iteration, is_final=is_final)
        assert response is not None, "a finished sequence always has a response"
        self._forget_sequence(sequence)
        if is_final:
            del self._live[live.request_id]
        self._post(live, response)

    def _fail(self, plan: IterationPlan, error: Exception) -> None:
        """Every request of the plan ends with an error; the others know nothing of it."""
        with self._changed:
            self._batch_manager.abandon(plan)
        for item in plan.scheduled:
            sequence = self._sequences.get(item.request.request_id)
            if sequence is not None:
                self._fail_request(
                    sequence.request, EngineStepError(f"the engine failed on this request's batch: {error}")
                )

    def _fail_request(self, live: LiveRequest, error: RequestError) -> None:
        with self._changed:
            for sequence in live.sequences:
                self._batch_manager.cancel_request(sequence.scheduled.request_id)
                self._forget_sequence(sequence)
            if self._live.pop(live.request_id, None) is None:
                return
        self._post(live, live.error_response(error))

    def _forget_sequence(self, sequence: LiveSequence) -> None:
        sequence_id = sequence.scheduled.request_id
        if self._sequences.pop(sequence_id, None) is None:
            return
        self._sampler.close(sequence_id)
        self._drafter.close(sequence_id)

    def _end_all(self, error: RequestError) -> None:
        for live in list(self._live.values()):
            self._fail_request(live, error)

    def _post(self, live: LiveRequest, response: Response) -> None:
        self._outbox.setdefault(live.listener, []).append(response)

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for listener, responses in outbox.items():
            try:
                listener(responses)
            except Exception:  # a listener is foreign code; its fault must not stop the others
                _logger.exception("a response listener failed; %d responses are lost", len(responses))
