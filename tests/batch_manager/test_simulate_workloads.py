"""Arrivals from published traces and from recorded runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batch_manager import BatchManagerConfig, FinishReason, KvCacheConfig, KvCacheManager, Request
from batch_manager.simulate import (
    LinearCost,
    OfferedRequest,
    RunMetrics,
    RunReport,
    Simulation,
    WorkloadFormatError,
    azure,
    burst_gpt,
    faster,
    mooncake,
    recorded,
    take,
)
from batch_manager.trace import InstantClock, ManualClock, TraceRecorder

SHARED_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Path of a published data file; the test is skipped where it is absent."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.is_file():
            pytest.skip(f"needs {name}, which is not part of the project (../shared/data)")
        return path

    return find


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake_rows_become_prompts_that_share_their_leading_blocks(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 1500, "input_length": 1200, "output_length": 7, "hash_ids": [0, 1, 3]}',
    )
    first, second = mooncake(path)
    assert (first.arrival_time, second.arrival_time) == (0.0, 1.5)
    assert (len(first.prompt_token_ids), second.num_output_tokens) == (1100, 7)
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024] != second.prompt_token_ids[1024]


def test_scaled_mooncake_prompts_still_share_the_same_part(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        '{"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1]}',
        '{"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [0, 2]}',
    )
    first, second = mooncake(path, length_scale=1 / 16)
    assert len(first.prompt_token_ids) == 64
    assert first.prompt_token_ids[:32] == second.prompt_token_ids[:32]
    assert first.prompt_token_ids[32] != second.prompt_token_ids[32]
    assert first.num_output_tokens == 1


def test_azure_rows_arrive_relative_to_the_first_second(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    offered = list(azure(path))
    assert [request.arrival_time for request in offered] == pytest.approx([0.68059, 4.995169])
    assert [len(request.prompt_token_ids) for request in offered] == [374, 396]
    assert offered[0].prompt_token_ids[0] != offered[1].prompt_token_ids[0]


def test_burst_gpt_rows_of_failed_requests_are_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,Conversation log",
        "118,GPT-4,417,276,693,API log",
    )
    offered = list(burst_gpt(path))
    assert [(r.arrival_time, len(r.prompt_token_ids), r.num_output_tokens) for r in offered] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]


Source = Callable[[Path], Iterator[OfferedRequest]]


@pytest.mark.parametrize(
    ("source", "text", "complaint"),
    [
        (mooncake, "{}", "line 1: expected timestamp, input_length, output_length and hash_ids; KeyError"),
        (mooncake, "timestamp", "line 1: expected timestamp"),
        (mooncake, '{"timestamp":0,"input_length":5,"output_length":5,"hash_ids":[]}', "0 hash_ids for 5 tokens"),
        (mooncake, '{"timestamp":0,"input_length":-5,"output_length":5,"hash_ids":[1]}', "a length of -5"),
        (azure, "a,b\n1,2", "line 2: expected TIMESTAMP, ContextTokens and GeneratedTokens; KeyError"),
        (azure, "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3", "line 2: .* ValueError"),
        (burst_gpt, "Timestamp,Request tokens,Response tokens\n1,many,3", "line 2: .* ValueError"),
    ],
)
def test_a_row_of_another_format_is_an_error_that_names_the_line(
    tmp_path: Path, source: Source, text: str, complaint: str
) -> None:
    with pytest.raises(WorkloadFormatError, match=complaint):
        list(source(written(tmp_path / "trace", text)))


@pytest.mark.parametrize(
    ("source", "name", "num_rows"),
    [
        (mooncake, "mooncake_conversation_trace.jsonl", 12_031),
        (mooncake, "mooncake_synthetic_trace.jsonl", 3_993),
        (azure, "azure_llm_conv_2023.csv", 19_366),
        (azure, "azure_llm_code_2023.csv", 8_819),
    ],
)
def test_published_traces_are_read_to_the_last_row(
    shared_data: Callable[[str], Path], source: Callable[..., Iterator[OfferedRequest]], name: str, num_rows: int
) -> None:
    times = [request.arrival_time for request in source(shared_data(name), length_scale=0.01)]
    assert len(times) == num_rows
    assert times == sorted(times)


def test_the_mooncake_conversations_find_their_earlier_turns_in_the_cache(shared_data: Callable[[str], Path]) -> None:
    path = shared_data("mooncake_conversation_trace.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:1500]]
    known: set[int] = set()
    num_known = 0
    for row in rows:
        num_known += sum(block in known for block in row["hash_ids"])
        known.update(row["hash_ids"])
    metrics = RunMetrics()
    config = BatchManagerConfig(max_batch_size=64, max_num_tokens=2048)
    Simulation(config, KvCacheConfig(num_blocks=100_000, tokens_per_block=16), LinearCost(0.01), [metrics]).run(
        take(faster(mooncake(path, length_scale=1 / 32), 4.0), 1500)
    )
    report = RunReport.of(metrics)
    assert report.num_ended == {"LENGTH": 1500}
    assert report.cache_hits == pytest.approx(num_known * 512 / sum(row["input_length"] for row in rows), rel=0.05)


def record_conversation(path: Path) -> list[Request]:
    """A request that stops early, one whose prompt goes on where the first ended, a cancelled and a late one."""
    manual = ManualClock(100.0)
    clock = InstantClock(manual)
    kv = KvCacheManager(KvCacheConfig(num_blocks=64, tokens_per_block=4), clock)
    requests = [
        Request(0, [11] * 8, 30, arrival_time=100.0, stop_words=[[21, 22]]),
        Request(1, [11] * 8 + [20] * 4 + [21, 22], 5, arrival_time=110.0),
        Request(2, [13] * 8, 30, arrival_time=110.0),
        Request(3, [14] * 8, 30, arrival_time=110.0, allotted_time=3.5, tenant="late"),
    ]
    with TraceRecorder(BatchManagerConfig(), kv, clock, path) as manager:
        waiting = list(requests)
        while waiting or manager.has_work:
            if not manager.has_work:
                manual.now = max(manual.now, waiting[0].arrival_time)
            while waiting and waiting[0].arrival_time <= manual.now:
                manager.add_request(waiting.pop(0))
            if manual.now == 114.0:
                manager.cancel_request(2)
            plan = manager.schedule()
            manual.now += 1.0
            sampled = []
            for entry in plan.scheduled:
                number = entry.request.num_generated_tokens
                sampled.append([(20, 20, 20, 20, 21, 22, 23)[number] if entry.request.request_id == 0 else 30])
            manager.update(plan, sampled)
    return requests


def test_a_recorded_run_is_offered_again_as_it_was(tmp_path: Path) -> None:
    requests = record_conversation(tmp_path / "run.jsonl")
    assert [request.finish_reason for request in requests] == [
        FinishReason.STOP_WORDS,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.TIMED_OUT,
    ]
    offered = recorded(tmp_path / "run.jsonl")
    assert offered[0] == OfferedRequest(100.0, [11] * 8, 6, 30, [20] * 4 + [21, 22])
    assert (offered[1].num_output_tokens, offered[1].output_token_ids) == (5, [30] * 5)
    assert (offered[2].num_output_tokens, offered[2].cancel_after) == (30, 4.0)
    assert (offered[3].allotted_time, offered[3].tenant) == (3.5, "late")


def test_a_recorded_conversation_finds_the_same_answers_in_the_cache_again(tmp_path: Path) -> None:
    requests = record_conversation(tmp_path / "run.jsonl")
    metrics = RunMetrics()
    simulation = Simulation(
        BatchManagerConfig(), KvCacheConfig(num_blocks=64, tokens_per_block=4), LinearCost(1.0), [metrics]
    )
    simulation.run(recorded(tmp_path / "run.jsonl"))
    assert metrics.num_reused_tokens == requests[1].receipt.num_reused_tokens == 13
    assert {reason.name: count for reason, count in metrics.num_ended.items()} == {
        "END_ID": 1,
        "LENGTH": 1,
        "CANCELLED": 1,
        "TIMED_OUT": 1,
    }
