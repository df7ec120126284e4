"""A recorded run can be replayed: the scheduler decides the same again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batch_manager.trace import replay
from executor import (
    CapacitySchedulerPolicy,
    ExternalDraftTokensConfig,
    InvalidRequestError,
    KvCacheConfig,
    LookaheadDecodingConfig,
    SamplingConfig,
    SchedulerConfig,
)
from tests.executor.driving import OpenExecutor, finish, request, run_one


@pytest.mark.parametrize(
    ("redact", "kv"),
    [
        pytest.param(False, KvCacheConfig(max_tokens=200), id="as it is"),
        pytest.param(True, KvCacheConfig(max_tokens=200), id="redacted"),
        pytest.param(True, KvCacheConfig(max_tokens=200, host_cache_size=400_000), id="redacted, with a host tier"),
    ],
)
def test_a_served_run_is_replayed_without_a_difference(
    open_executor: OpenExecutor, tmp_path: Path, redact: bool, kv: KvCacheConfig
) -> None:
    path = tmp_path / "run.jsonl"
    executor = open_executor(
        trace_path=path,
        trace_redact=redact,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=kv,
        max_num_tokens=24,
        max_queue_size=40,
    )
    source = random.Random(1)
    ids = []
    for index in range(30):
        prompt = [source.randrange(3, 128) for _ in range(source.randint(1, 30))]
        fields: dict[str, Any] = {}
        if index % 5 == 0:
            prompt, fields["lookahead_config"] = [5, 6, 7] * 8, LookaheadDecodingConfig()
        if index % 5 == 1:
            fields["external_draft_tokens_config"] = ExternalDraftTokensConfig([9, 9])
        if index % 5 == 2:
            fields["allotted_time_ms"] = source.randint(1, 60)
        if index % 5 == 3:
            fields |= {"output": {"return_context_logits": True}, "stop_words": [[7, 8], [9]]}
        if index % 10 == 4:
            fields["sampling_config"] = SamplingConfig(temperature=1.0, num_return_sequences=2)
        ids.append(executor.enqueue_request(request(prompt, source.randint(1, 40), **fields)))
        if index % 6 == 0:
            executor.cancel_request(ids[source.randrange(len(ids))])
    for request_id in ids:
        finish(executor, request_id)
    executor.shutdown()

    result = replay(path)
    assert result.is_complete
    assert result.difference is None, result.difference
    assert result.num_requests == 33
    assert result.num_iterations > 30


def test_a_trace_that_cannot_be_written_is_an_error_at_the_start(open_executor: OpenExecutor, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        open_executor(trace_path=tmp_path / "missing" / "run.jsonl")


def test_a_redacted_trace_holds_neither_prompts_nor_answers(open_executor: OpenExecutor, tmp_path: Path) -> None:
    written = []
    for redact in (False, True):
        path = tmp_path / f"{redact}.jsonl"
        executor = open_executor(trace_path=path, trace_redact=redact)
        answer = run_one(executor, request([101, 57, 83, 99], 8)).output_token_ids[0]
        executor.shutdown()
        written.append(tokens_in(path))
    plain, redacted = written
    assert plain == [101, 57, 83, 99, *answer]
    assert len(redacted) == len(plain)
    assert not set(redacted) & set(plain)


def tokens_in(path: Path) -> list[int]:
    """The prompt and the sampled tokens of the one request of a trace, in order."""
    tokens: list[int] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        tokens += record.get("add", {}).get("prompt", [])
        for row in record.get("tokens", []):
            tokens += row if isinstance(row, list) else [row]
    return tokens


def test_redaction_without_a_trace_is_refused(open_executor: OpenExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="trace_redact is set without a trace_path"):
        open_executor(trace_redact=True)
