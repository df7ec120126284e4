"""The model runner against a naive packing of the same plan; its engine only remembers what it was given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from batch_manager.plan import BlockCopy, IterationPlan, Phase, ScheduledRequest
from batch_manager.request import Request
from executor.engines.interface import Engine, EngineSpec, PendingLogits, StepInputs
from executor.model_runner import InvalidPlanError, ModelRunner

VOCAB_SIZE = 50


class RecordingEngine(Engine):
    """Logits of sampled row i are all i; remembers the order of what it was asked to do."""

    def __init__(self, tokens_per_block: int = 4) -> None:
        self.spec = EngineSpec(
            vocab_size=VOCAB_SIZE,
            num_layers=1,
            num_kv_heads=1,
            head_size=2,
            tokens_per_block=tokens_per_block,
            max_batch_size=64,
            max_num_tokens=1024,
            max_input_len=512,
            max_seq_len=512,
            kv_bytes_per_block=16 * tokens_per_block,
        )
        self.num_blocks = 1000
        self.calls: list[tuple[str, object]] = []

    def submit(self, inputs: StepInputs) -> PendingLogits:
        self.calls.append(("submit", inputs))
        rows = np.arange(len(inputs.sampled_rows), dtype=np.float32)
        return lambda: np.repeat(rows[:, None], VOCAB_SIZE, axis=1)

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def warm_up(self) -> None: ...

    def copy_blocks(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self.calls.append(("copy", (sources.tolist(), targets.tolist())))

    def read_block(self, block_id: int) -> NDArray[np.uint8]:
        raise NotImplementedError(block_id)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        raise NotImplementedError(block_id)

    def close(self) -> None: ...


def make_request(request_id: int, tokens: list[int], block_ids: list[int], drafts: list[int] | None = None) -> Request:
    request = Request(request_id, tokens, max_new_tokens=100)
    request.draft_token_ids = drafts or []
    request.block_ids = block_ids
    return request


def schedule(
    request: Request, start: int, num_tokens: int, *, replayed: int = 0, drafts: int = 0, samples: bool = True
) -> ScheduledRequest:
    return ScheduledRequest(
        request=request,
        start=start,
        num_scheduled_tokens=num_tokens,
        num_replayed_tokens=replayed,
        num_draft_tokens=drafts,
        num_tokens_with_spec=request.num_tokens_with_spec,
        num_reused_tokens=0,
        samples=samples,
        phase=Phase.CONTEXT,
    )


def make_plan(*scheduled: ScheduledRequest, copies: list[BlockCopy] | None = None) -> IterationPlan:
    num_tokens = sum(entry.num_rows for entry in scheduled)
    return IterationPlan(1, list(scheduled), num_tokens, copies or [], paused=[], timed_out=[])


def test_a_chunk_a_decode_and_a_verify_are_packed_one_behind_the_other() -> None:
    chunk = schedule(make_request(0, list(range(10, 20)), [7, 2, 5]), 4, 4, samples=False)
    decode = schedule(make_request(1, list(range(20, 30)), [3, 1, 4]), 9, 1, replayed=1)
    verify = schedule(make_request(2, list(range(30, 36)), [8, 6], drafts=[40, 41]), 5, 3, drafts=2)
    inputs = ModelRunner(RecordingEngine(), min_rows_per_sequence=2).prepare(make_plan(chunk, decode, verify))

    assert inputs.input_ids.tolist() == [14, 15, 16, 17, 28, 29, 35, 40, 41]
    assert inputs.position_ids.tolist() == [4, 5, 6, 7, 8, 9, 5, 6, 7]
    assert inputs.past_lens.tolist() == [4, 8, 5]
    assert inputs.subsequence_begins.tolist() == [0, 4, 6, 9]
    assert inputs.block_indices.tolist() == [7, 2, 3, 1, 4, 8, 6]
    assert inputs.block_indices_begins.tolist() == [0, 2, 5, 7]
    assert inputs.sampled_rows.tolist() == [5, 6, 7, 8]
    dtypes = [array.dtype for array in inputs]
    assert dtypes == [np.int64, np.int64, np.int32, np.int32, np.int32, np.int32, np.int64]


def test_each_request_gets_its_own_rows_of_the_logits() -> None:
    silent = schedule(make_request(0, list(range(8)), [0, 1]), 0, 8, samples=False)
    verify = schedule(make_request(1, list(range(6)), [2, 3], drafts=[1, 2]), 5, 3, drafts=2)
    decode = schedule(make_request(2, list(range(5)), [4, 5]), 4, 1)
    step = ModelRunner(RecordingEngine()).submit(make_plan(silent, verify, decode)).wait()
    assert [step.logits[rows][:, 0].tolist() for rows in step.rows] == [[], [0, 1, 2], [3]]


def test_a_request_whose_logits_are_all_wanted_gets_every_computed_row_and_no_replayed_one() -> None:
    chunk = schedule(make_request(0, list(range(8)), [0, 1]), 2, 3, replayed=1, samples=False)
    decode = schedule(make_request(1, list(range(5)), [4, 5]), 4, 1, replayed=1)
    verify = schedule(make_request(2, list(range(6)), [2, 3], drafts=[1]), 4, 3, drafts=1)
    runner = ModelRunner(RecordingEngine(), min_rows_per_sequence=2)
    plan = make_plan(chunk, decode, verify)
    assert runner.prepare(plan, all_rows_of={0, 2}).sampled_rows.tolist() == [1, 2, 3, 5, 6, 7, 8]
    step = runner.submit(plan, all_rows_of={0, 2}).wait()
    assert [step.logits[rows][:, 0].tolist() for rows in step.computed_rows] == [[0, 1, 2], [], [4, 5, 6]]
    assert [step.logits[rows][:, 0].tolist() for rows in step.rows] == [[], [3], [5, 6]]


def test_blocks_are_copied_before_the_step_and_not_mentioned_when_there_are_none() -> None:
    engine = RecordingEngine()
    runner = ModelRunner(engine)
    entry = schedule(make_request(0, [1, 2, 3], [5]), 2, 1)
    runner.submit(make_plan(entry, copies=[BlockCopy(9, 5, 2), BlockCopy(8, 6, 1)]))
    runner.submit(make_plan(entry))
    assert [name for name, _ in engine.calls] == ["copy", "submit", "submit"]
    assert engine.calls[0][1] == ([9, 8], [5, 6])


def test_a_one_token_prompt_gets_a_padding_row_and_samples_its_first_row_in_deterministic_mode() -> None:
    prompt = schedule(make_request(0, [17], [6]), 0, 1)
    decode = schedule(make_request(1, [1, 2, 3], [2]), 2, 1, replayed=1)
    inputs = ModelRunner(RecordingEngine(), min_rows_per_sequence=2).prepare(make_plan(prompt, decode))
    assert inputs.input_ids.tolist() == [17, 17, 2, 3]
    assert inputs.position_ids.tolist() == [0, 1, 1, 2]
    assert inputs.past_lens.tolist() == [0, 1]
    assert inputs.subsequence_begins.tolist() == [0, 2, 4]
    assert inputs.block_indices.tolist() == [6, 2]
    assert inputs.sampled_rows.tolist() == [0, 3]


def test_a_one_token_prompt_is_one_row_outside_deterministic_mode() -> None:
    inputs = ModelRunner(RecordingEngine()).prepare(make_plan(schedule(make_request(0, [17], [6]), 0, 1)))
    assert inputs.input_ids.tolist() == [17]
    assert inputs.sampled_rows.tolist() == [0]


@pytest.mark.parametrize("num_rows", [0, 3])
def test_only_one_or_two_rows_per_sequence_can_be_asked_for(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"min_rows_per_sequence is {num_rows}"):
        ModelRunner(RecordingEngine(), min_rows_per_sequence=num_rows)


def test_blocks_too_small_for_the_padding_row_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="blocks of at least 2 tokens"):
        ModelRunner(RecordingEngine(tokens_per_block=1), min_rows_per_sequence=2)


class Refusal(NamedTuple):
    entry: ScheduledRequest
    message: str


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(schedule(make_request(3, [1, 2], [0]), 1, 2), "request 3 .* position 3 but has 2 tokens"),
        Refusal(
            schedule(make_request(3, list(range(9)), [0, 1]), 0, 9),
            "position 9 .* 2 blocks of 4 tokens hold 8",
        ),
        Refusal(schedule(make_request(3, [1, 2], [0]), 1, 1, replayed=2), "replays 2 rows before position 1"),
        Refusal(schedule(make_request(3, [1, 2], [0]), 1, 0), "scheduled with 0 rows"),
        Refusal(schedule(make_request(3, list(range(3)), [0], drafts=[4]), 1, 2, drafts=2), "samples 3 rows"),
        Refusal(schedule(make_request(3, [1, 2], [0]), 1, 1), "row before it must be replayed"),
    ],
    ids=lambda refusal: refusal.message,
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_is_copied(refusal: Refusal) -> None:
    engine = RecordingEngine()
    plan = make_plan(refusal.entry, copies=[BlockCopy(0, 1, 1)])
    with pytest.raises(InvalidPlanError, match=refusal.message):
        ModelRunner(engine, min_rows_per_sequence=2).submit(plan)
    assert engine.calls == []


@st.composite
def plans(draw: st.DrawFn) -> tuple[IterationPlan, int, int]:
    """A plan any scheduler could make, with the block size and the row minimum it was made for."""
    tokens_per_block = draw(st.integers(2, 7))
    min_rows = draw(st.integers(1, 2))
    entries = []
    for request_id in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30))
        drafts = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4))
        start = draw(st.integers(0, len(tokens) - 1))
        verifies = draw(st.booleans())
        end = len(tokens) + len(drafts) if verifies else draw(st.integers(start + 1, len(tokens)))
        replayed = min(start, max(0, min_rows - (end - start)))
        num_blocks = -(-end // tokens_per_block) + draw(st.integers(0, 2))
        block_ids = draw(st.permutations(range(60)))[:num_blocks]
        entries.append(
            schedule(
                make_request(request_id, tokens, list(block_ids), drafts),
                start,
                end - start,
                replayed=replayed,
                drafts=len(drafts) if verifies else 0,
                samples=verifies or draw(st.booleans()),
            )
        )
    return make_plan(*entries), tokens_per_block, min_rows


@given(plans())
def test_packing_equals_the_row_by_row_definition(case: tuple[IterationPlan, int, int]) -> None:
    plan, tokens_per_block, min_rows = case
    inputs = ModelRunner(RecordingEngine(tokens_per_block), min_rows).prepare(plan)
    sampled: list[int] = []
    for index, entry in enumerate(plan.scheduled):
        request = entry.request
        everything = request.token_ids + request.draft_token_ids
        begin, end = inputs.subsequence_begins[index : index + 2].tolist()
        first = entry.start - entry.num_replayed_tokens
        positions = list(range(first, entry.start + entry.num_scheduled_tokens))
        expected_ids = [everything[position] for position in positions]
        if len(positions) < min_rows:
            assert positions == [0]
            positions, expected_ids = [0, 1], expected_ids * 2
        assert inputs.past_lens[index] == first
        assert inputs.position_ids[begin:end].tolist() == positions
        assert inputs.input_ids[begin:end].tolist() == expected_ids
        table_begin, table_end = inputs.block_indices_begins[index : index + 2].tolist()
        num_blocks = positions[-1] // tokens_per_block + 1
        assert inputs.block_indices[table_begin:table_end].tolist() == request.block_ids[:num_blocks]
        if entry.samples:
            last = entry.start + entry.num_scheduled_tokens - 1
            sampled += [begin + last - first - back for back in range(entry.num_draft_tokens, -1, -1)]
    assert inputs.sampled_rows.tolist() == sampled
    assert inputs.subsequence_begins[-1] == len(inputs.input_ids) == len(inputs.position_ids)
    assert inputs.block_indices_begins[-1] == len(inputs.block_indices)
