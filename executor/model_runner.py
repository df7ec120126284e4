"""From an iteration plan to one forward pass: packs the plan, runs it, hands the logits back by request.

```
plan.scheduled   | request 0: context chunk, samples | request 1: decode | request 2: verify 2 drafts |
                   start 4, 4 tokens                   start 9, replays 1  start 5, 3 tokens
input_ids        |  t4  t5  t6  t7                   |  t8  t9           |  t5  d0  d1                |
position_ids     |   4   5   6   7                   |   8   9           |   5   6   7                |
past_lens        |   4                               |   8               |   5                        |
sampled rows                   *                            *               *   *   *
```
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batch_manager.kv import NO_BLOCK
from batch_manager.plan import BlockCopy, IterationPlan, ScheduledRequest
from executor.engines.interface import Engine, PendingLogits, StepInputs


class InvalidPlanError(ValueError):
    """A plan that no forward pass can carry out: names the request and the number that is wrong."""


class StepLogits(NamedTuple):
    """What a forward pass gave, by request."""

    logits: NDArray[np.float32]
    """[S, vocab_size], the engine's own buffer: valid until the next step."""
    rows: list[slice]
    """For each entry of `plan.scheduled` its rows of `logits`; an empty slice where nothing is sampled.

    With k drafts there are 1 + k rows: row 0 follows the last committed token, row i the i-th draft.
    """
    computed_rows: list[slice]
    """For each entry of `plan.scheduled` the rows of `logits` of all positions computed for it, `start` on, where they
    were asked for; else an empty slice."""
    inputs: StepInputs
    """What the engine was given."""


class RunningStep(NamedTuple):
    """A forward pass that has begun. Fields as of `StepLogits`."""

    collect: PendingLogits
    rows: list[slice]
    computed_rows: list[slice]
    inputs: StepInputs

    def wait(self) -> StepLogits:
        """Call it once, whatever happens meanwhile, before the next step is submitted."""
        return StepLogits(self.collect(), self.rows, self.computed_rows, self.inputs)


class ModelRunner:
    """Runs iteration plans on an engine. Holds no state of its own between steps.

    Deterministic mode (`min_rows_per_sequence=2`) promises that every sequence has two query rows in every
    step. The scheduler keeps that promise by replaying the row before `start`. A prompt of one token has no row
    before it: there the runner appends a padding row, the same token at the next position. Causality keeps it
    from being seen by the sampled row, its K and V lie in a block that the sequence holds already, and the next
    step writes over them.
    """

    def __init__(self, engine: Engine, min_rows_per_sequence: int = 1) -> None:
        """Bind to an engine.

        Args:
            engine: runs the steps; only this runner may call its `submit` and `copy_blocks` meanwhile.
            min_rows_per_sequence: 1, or 2 for deterministic mode; the same number the scheduler was given.

        Raises:
            ValueError: another number, or blocks too small to hold the padding row.
        """
        if min_rows_per_sequence not in (1, 2):
            raise ValueError(
                f"min_rows_per_sequence is {min_rows_per_sequence}; it must be 1, or 2 (deterministic mode)"
            )
        if engine.spec.tokens_per_block < min_rows_per_sequence:
            raise ValueError(
                f"deterministic mode needs blocks of at least {min_rows_per_sequence} tokens, "
                f"the engine's hold {engine.spec.tokens_per_block}"
            )
        self.engine = engine
        self.min_rows_per_sequence = min_rows_per_sequence

    def prepare(self, plan: IterationPlan, all_rows_of: Container[int] = ()) -> StepInputs:
        """Pack the plan's requests into step inputs. Reads the requests, changes nothing.

        Args:
            plan: the iteration.
            all_rows_of: ids of requests whose logits are wanted at every computed position, not only where they are
                sampled.

        Raises:
            InvalidPlanError: a request's tokens or block table do not cover what is scheduled for it, or it has
                fewer rows than `min_rows_per_sequence`.
        """
        tokens_per_block = self.engine.spec.tokens_per_block
        token_ids: list[int] = []
        block_ids: list[int] = []
        past_lens: list[int] = []
        row_ends: list[int] = []
        block_ends: list[int] = []
        sampled_rows: list[int] = []
        for scheduled in plan.scheduled:
            request = scheduled.request
            first = scheduled.start - scheduled.num_replayed_tokens
            end = scheduled.start + scheduled.num_scheduled_tokens
            num_committed = len(request.token_ids)
            num_blocks = -(-end // tokens_per_block)
            if first < 0 or end <= first or end > request.num_tokens_with_spec or num_blocks > len(request.block_ids):
                raise _refused(scheduled, tokens_per_block)

            begin_row = len(token_ids)
            token_ids += request.token_ids[first:end]
            if end > num_committed:
                token_ids += request.draft_token_ids[max(first - num_committed, 0) : end - num_committed]
            last_row = len(token_ids) - 1
            if end - first < self.min_rows_per_sequence:
                if first > 0:
                    raise InvalidPlanError(
                        f"request {request.request_id} has one row, position {first}; with "
                        f"min_rows_per_sequence={self.min_rows_per_sequence} the row before it must be replayed"
                    )
                token_ids.append(token_ids[-1])
            num_samples = 1 + scheduled.num_draft_tokens if scheduled.samples else 0
            if last_row - begin_row + 1 < num_samples:
                raise _refused(scheduled, tokens_per_block)
            num_wanted = scheduled.num_scheduled_tokens if request.request_id in all_rows_of else num_samples
            sampled_rows += range(last_row + 1 - num_wanted, last_row + 1)
            block_ids += request.block_ids[:num_blocks]
            past_lens.append(first)
            row_ends.append(len(token_ids))
            block_ends.append(len(block_ids))

        past = np.array(past_lens, np.int32)
        subsequence_begins = _begins(row_ends)
        # Row r of sequence b is at position past_lens[b] + (r - subsequence_begins[b]).
        offsets = past - subsequence_begins[:-1]
        positions = np.arange(len(token_ids), dtype=np.int64)
        positions += np.repeat(offsets, np.diff(subsequence_begins))
        return StepInputs(
            input_ids=np.array(token_ids, np.int64),
            position_ids=positions,
            past_lens=past,
            subsequence_begins=subsequence_begins,
            block_indices=self._block_indices(block_ids, block_ends),
            block_indices_begins=_begins(block_ends),
            sampled_rows=np.array(sampled_rows, np.int64),
        )

    def _block_indices(self, block_ids: list[int], block_ends: list[int]) -> NDArray[np.int32]:
        """The tables of all requests. A block that a request gave back, since its rows do not attend to it any more, is
        named by the request's last one: nothing is read of it there, and nobody else writes to it meanwhile.
        """
        indices = np.array(block_ids, np.int32)
        if self.engine.spec.sliding_window is not None:
            ends = np.array(block_ends)
            last = np.repeat(indices[ends - 1], np.diff(ends, prepend=0))
            np.copyto(indices, last, where=indices == NO_BLOCK)
        return indices

    def submit(self, plan: IterationPlan, all_rows_of: Container[int] = ()) -> RunningStep:
        """Carry out the plan: its block copies, then begin its forward pass. Arguments as for `prepare`.

        Raises:
            InvalidPlanError: see `prepare`; nothing was copied or computed.
            InvalidStepError: the engine refused the step inputs.
        """
        inputs = self.prepare(plan, all_rows_of)
        self.copy_blocks(plan.copies)
        collect = self.engine.submit(inputs)
        rows: list[slice] = []
        computed_rows: list[slice] = []
        end = 0
        for scheduled in plan.scheduled:
            begin = end
            num_samples = 1 + scheduled.num_draft_tokens if scheduled.samples else 0
            wants_all = scheduled.request.request_id in all_rows_of
            end += scheduled.num_scheduled_tokens if wants_all else num_samples
            rows.append(slice(end - num_samples, end))
            computed_rows.append(slice(begin, end if wants_all else begin))
        return RunningStep(collect, rows, computed_rows, inputs)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy whole blocks: what lies beyond a copy's `num_tokens` is written before it is read."""
        if copies:
            self.engine.copy_blocks(
                np.array([copy.source for copy in copies], np.int64),
                np.array([copy.target for copy in copies], np.int64),
            )


def _begins(ends: list[int]) -> NDArray[np.int32]:
    begins = np.zeros(len(ends) + 1, np.int32)
    begins[1:] = ends
    return begins


def _refused(scheduled: ScheduledRequest, tokens_per_block: int) -> InvalidPlanError:
    """Say which of the plan's promises about one request does not hold."""
    request = scheduled.request
    who = f"request {request.request_id}"
    end = scheduled.start + scheduled.num_scheduled_tokens
    if scheduled.num_replayed_tokens > scheduled.start:
        return InvalidPlanError(f"{who} replays {scheduled.num_replayed_tokens} rows before position {scheduled.start}")
    if scheduled.num_rows <= 0:
        return InvalidPlanError(f"{who} is scheduled with {scheduled.num_rows} rows; it must have at least one")
    if end > request.num_tokens_with_spec:
        return InvalidPlanError(
            f"{who} is scheduled up to position {end} but has {request.num_tokens_with_spec} tokens "
            f"({len(request.token_ids)} committed, {len(request.draft_token_ids)} drafts)"
        )
    if end > len(request.block_ids) * tokens_per_block:
        return InvalidPlanError(
            f"{who} is scheduled up to position {end} but its {len(request.block_ids)} blocks "
            f"of {tokens_per_block} tokens hold {len(request.block_ids) * tokens_per_block}"
        )
    return InvalidPlanError(
        f"{who} samples {1 + scheduled.num_draft_tokens} rows ({scheduled.num_draft_tokens} drafts) "
        f"but is scheduled with {scheduled.num_rows}"
    )
