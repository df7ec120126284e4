"""A redacted trace decides the same and does not tell what was said."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager import BatchManagerConfig, FinishReason, KvCacheConfig, KvCacheManager, Request
from batch_manager.request import MultimodalSpan
from batch_manager.simulate import recorded
from batch_manager.trace import InstantClock, ManualClock, TraceError, TraceReader, TraceRecorder, replay
from batch_manager.trace.records import Arrival
from batch_manager.trace.redaction import Redactor

prompts = st.lists(st.sampled_from([0, 1, 2, 9, 150_000, 2**31 - 1]), min_size=1, max_size=6)


@given(prompts, prompts)
def test_codes_compare_as_their_tokens_do_up_to_the_first_difference(left: list[int], right: list[int]) -> None:
    redactor = Redactor()
    left_codes = redactor.redact_request(Request(1, left, 1)).token_ids
    right_codes = redactor.redact_request(Request(2, right, 1)).token_ids
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert left_codes[:common] == right_codes[:common]
    assert (left_codes < right_codes) == (left < right)
    assert (left_codes == right_codes) == (left == right)


def test_how_often_a_token_occurs_cannot_be_counted() -> None:
    codes = Redactor().redact_request(Request(1, [17] * 200, 1)).token_ids
    assert max(Counter(codes).values()) == 1


def test_the_size_of_a_code_says_nothing_about_the_size_of_the_token() -> None:
    count = 2500
    small = sorted(Redactor().redact_request(Request(1, [10], 1)).token_ids[0] for _ in range(count))
    large = [Redactor().redact_request(Request(1, [140_000], 1)).token_ids[0] for _ in range(count)]
    larger = sum(bisect_left(small, code) for code in large) / count**2
    # Codes are drawn anew each time: the bounds are six standard deviations away, sqrt((2n + 1) / 12) / n each.
    assert 0.45 < larger < 0.55


def test_two_recordings_have_nothing_in_common() -> None:
    first, second = (Redactor().redact_request(Request(1, [1, 2, 3], 1)).token_ids for _ in range(2))
    assert not set(first) & set(second)


def test_salts_and_items_are_equal_exactly_when_they_were() -> None:
    redactor = Redactor()
    salts = [redactor.redact_request(Request(1, [1], 1, cache_salt=salt)).cache_salt for salt in (5, 5, 6, None)]
    assert salts[0] == salts[1] != salts[2]
    assert salts[3] is None
    assert 5 not in salts
    items = [
        redactor.redact_request(Request(1, [1] * 4, 1, multimodal_spans=[MultimodalSpan(0, 2, digest)]))
        for digest in (b"a" * 32, b"a" * 32, b"b" * 32)
    ]
    hashes = [item.multimodal_spans[0].content_hash for item in items]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] != b"a" * 32


def test_a_token_id_out_of_range_is_refused() -> None:
    with pytest.raises(TraceError, match="token id -4 cannot be redacted"):
        Redactor().redact_request(Request(1, [-4], 1))


def test_a_redacted_trace_ends_its_requests_as_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clock = InstantClock(ManualClock())
    kv = KvCacheManager(KvCacheConfig(num_blocks=64, tokens_per_block=4), clock)
    requests = [
        Request(0, [11] * 6, 30, end_id=500),
        Request(1, [11] * 6, 30, stop_words=[[501, 502]]),
        Request(2, [11] * 6, 3),
    ]
    with TraceRecorder(BatchManagerConfig(), kv, clock, path, redact=True) as manager:
        for request in requests:
            manager.add_request(request)
        script = {0: [601, 500], 1: [601, 501, 502], 2: [601, 601, 601]}
        while manager.has_work:
            plan = manager.schedule()
            manager.update(
                plan,
                [
                    [script[e.request.request_id][e.request.num_generated_tokens]] if e.samples else []
                    for e in plan.scheduled
                ],
            )
    assert [request.finish_reason for request in requests] == [
        FinishReason.END_ID,
        FinishReason.STOP_WORDS,
        FinishReason.LENGTH,
    ]
    assert replay(path).difference is None
    outputs = [request.output_token_ids for request in recorded(path)]
    assert list(map(len, outputs)) == [2, 3, 3]
    with TraceReader(path) as reader:
        assert reader.header.is_redacted
        arrivals = [record for record in reader if isinstance(record, Arrival)]
    assert len({tuple(record.request.token_ids) for record in arrivals}) == 1
    written = set(map(int, re.findall(r"\d+", path.read_text())))
    assert not written & {500, 501, 502, 601}
