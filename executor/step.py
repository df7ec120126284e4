"""One iteration's computation: a forward pass, then a draw for each sequence that wants one.

```
engine's threads   | submit ······ forward pass ······ wait |
loop's thread             | Sampler.prepare: histories,     | Sampler.draw ─► tokens
                          |  penalties, bans, grammars      |
```
"""

from __future__ import annotations

import time
from typing import NamedTuple

from batch_manager import IterationPlan
from executor.api.errors import RequestError
from executor.context_logits import ContextLogits
from executor.debug_tensors import DebugTensors
from executor.live_request import LiveSequence
from executor.model_runner import ModelRunner, StepLogits
from executor.sampling import SampledRows, SampledSequence, Sampler, SamplingSpec


class ComputedStep(NamedTuple):
    sampled: list[SampledSequence]
    """One for each entry of `plan.scheduled`; without tokens where nothing is sampled."""
    engine_seconds: float


class Step:
    """Runs plans. Not thread-safe: the loop's thread makes all calls."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, debug_tensors: DebugTensors | None) -> None:
        self._runner = runner
        self._sampler = sampler
        self._debug_tensors = debug_tensors
        self._refused: dict[int, RequestError] = {}
        self._contexts: dict[int, ContextLogits] = {}
        """Of sequences whose prompt is not computed yet, and who want to know something at each of its positions."""

    def open(self, sequence: LiveSequence, spec: SamplingSpec) -> None:
        """Make a sequence known, before the first plan that it is in."""
        sequence_id = sequence.scheduled.request_id
        self._sampler.open(sequence_id, spec)
        if sequence.context is not None:
            self._contexts[sequence_id] = sequence.context

    def refuse(self, sequence_id: int, error: RequestError) -> None:
        """Instead of `open`: the sequence may be in a plan already, whose results will hold `error` for it."""
        self._refused[sequence_id] = error

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; one that is not open is left alone."""
        self._refused.pop(sequence_id, None)
        self._sampler.close(sequence_id)
        self._contexts.pop(sequence_id, None)

    def compute(self, plan: IterationPlan) -> ComputedStep:
        """Run a plan. Whatever it raises concerns the whole plan; what concerns one sequence is in its `error`."""
        started = time.monotonic()
        running = self._runner.submit(plan, self._contexts)
        try:
            samples = [item.samples and item.request.request_id not in self._refused for item in plan.scheduled]
            prepared = self._sampler.prepare(
                [
                    SampledRows(
                        item.request.request_id,
                        item.request.token_ids,
                        item.request.draft_token_ids[: item.num_draft_tokens],
                        logits.start,
                        logits.stop - logits.start,
                    )
                    for item, logits, is_drawn in zip(plan.scheduled, running.rows, samples, strict=True)
                    if is_drawn
                ]
            )
        finally:
            step = running.wait()
        engine_seconds = time.monotonic() - started
        if self._debug_tensors is not None:
            self._debug_tensors.record(plan, step)
        if self._contexts:
            self._collect_contexts(plan, step)
        drawn = iter(self._sampler.draw(step.logits, prepared))
        sampled = [
            next(drawn) if is_drawn else SampledSequence([], error=self._refused.get(item.request.request_id))
            for item, is_drawn in zip(plan.scheduled, samples, strict=True)
        ]
        return ComputedStep(sampled, engine_seconds)

    def _collect_contexts(self, plan: IterationPlan, step: StepLogits) -> None:
        """Before the sampler, which uses the logits as scratch."""
        for item, rows in zip(plan.scheduled, step.computed_rows, strict=True):
            sequence_id = item.request.request_id
            context = self._contexts.get(sequence_id)
            if context is not None:
                context.add(item.start, step.logits[rows])
                if context.is_complete:
                    del self._contexts[sequence_id]
