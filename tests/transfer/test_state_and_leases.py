"""The opaque state survives its way or is refused; deadlines are met in their order, whoever was put off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import InvalidRequestError
from executor.transfer.context_state import MAX_BYTES, ContextState, GeneratedLogProb
from executor.transfer.integrity import ModelIdentity, prompt_digest
from executor.transfer.layout import KvLayout
from executor.transfer.leases import Deadlines

STATE = ContextState(
    b"i" * 16,
    "10.0.0.1:4711",
    2**63,
    ModelIdentity(b"c" * 32, b"w" * 32, "float32"),
    KvLayout("float32", 32, 64, 30, 3, (0, 30), (0, 3)),
    4096,
    b"p" * 32,
)


@given(
    st.lists(st.tuples(st.floats(-50, 0), st.lists(st.tuples(st.integers(0, 2**31), st.floats(-50, 0)), max_size=20)))
)
def test_a_state_is_the_same_after_its_way_through_bytes(
    log_probs: list[tuple[float, list[tuple[int, float]]]],
) -> None:
    state = replace(STATE, log_probs=[GeneratedLogProb(*entry) for entry in log_probs])
    assert ContextState.from_bytes(state.to_bytes()) == state


def test_a_state_is_small_and_bounded() -> None:
    assert len(STATE.to_bytes()) < 256
    entry = GeneratedLogProb(-1.0, [(1, -1.0)] * 20)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_BYTES} are handed on"):
        replace(STATE, log_probs=[entry] * 1000).to_bytes()


@pytest.mark.parametrize("num_log_probs", [0, 300])
@pytest.mark.parametrize("num_blocks", [1, 8192, 100_000])
def test_blocks_are_named_where_they_fit_and_left_to_open_where_they_do_not(
    num_blocks: int, num_log_probs: int
) -> None:
    entry = GeneratedLogProb(-1.0, [(1, -1.0)] * 20)
    state = replace(STATE, block_ids=tuple(range(num_blocks)), log_probs=[entry] * num_log_probs)
    data = state.to_bytes()
    assert len(data) <= MAX_BYTES
    fits = num_blocks == 1 or (num_blocks == 8192 and num_log_probs == 0)
    assert ContextState.from_bytes(data) == (state if fits else replace(state, block_ids=()))


@given(st.binary(max_size=300))
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"context_phase_params\.opaque_state"):
        ContextState.from_bytes(data)


@given(st.integers(0, 255), st.data())
def test_a_state_with_one_byte_changed_is_refused(change: int, data: st.DataObject) -> None:
    whole = STATE.to_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= change
    if bytes(changed) != whole:
        with pytest.raises(InvalidRequestError):
            ContextState.from_bytes(bytes(changed))


def test_prompts_and_salts_have_digests_of_their_own() -> None:
    digests = {prompt_digest(tokens, salt) for tokens in ([], [1], [1, 2], [2, 1]) for salt in (None, 0, 1)}
    assert len(digests) == 12


@given(st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), st.integers(0, 50)))), st.lists(st.integers(0, 60)))
def test_whatever_is_due_expires_and_nothing_else(changes: list[tuple[int, int | None]], looks: list[int]) -> None:
    """Also what is due behind one that was put off: a heap, not a line."""
    deadlines: Deadlines[int] = Deadlines()
    known: dict[int, int] = {}
    for key, deadline in changes:
        if deadline is None:
            deadlines.discard(key)
            known.pop(key, None)
        else:
            deadlines.set(key, deadline)
            known[key] = deadline
    for now in sorted(looks):
        assert deadlines.next_deadline == min(known.values(), default=None)
        expired = {key for key, deadline in known.items() if deadline <= now}
        assert set(deadlines.pop_expired(now)) == expired
        known = {key: deadline for key, deadline in known.items() if key not in expired}
    assert len(deadlines) == len(known)


def test_heartbeats_leave_no_rubbish_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for beat in range(10_000):
        deadlines.set(beat % 3, float(beat))
    assert len(deadlines._heap) < 200
    assert sorted(deadlines.pop_expired(1e9)) == [0, 1, 2]
