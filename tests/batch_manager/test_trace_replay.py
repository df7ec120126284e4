"""A recorded run, replayed, decides the same; where it does not, the first difference is named."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batch_manager import (
    BatchManager,
    BatchManagerConfig,
    FinishReason,
    KvCacheConfig,
    KvCacheManager,
    Request,
    WaitCode,
)
from batch_manager.kv import BlockOwnershipError, CacheTier
from batch_manager.trace import (
    InstantClock,
    ManualClock,
    ObservedBatchManager,
    ObservedKvCacheManager,
    Observer,
    TraceError,
    TraceFormatError,
    TraceReader,
    TraceRecorder,
    TraceVersionError,
    TraceWriteError,
    replay,
)
from batch_manager.trace.records import Arrival, Planning
from tests.batch_manager.random_run import RandomRun, random_configs


def record_random_run(path: Path, seed: int, num_actions: int, redact: bool = False) -> RandomRun:
    source = random.Random(seed)
    config, kv_config = random_configs(source)
    manual = ManualClock(1000.0)
    clock = InstantClock(manual)
    kv = ObservedKvCacheManager(kv_config, clock)
    with TraceRecorder(config, kv, clock, path, redact=redact) as manager:
        run = RandomRun(manager, kv, manual, source)
        run.run(num_actions)
    return run


def record_two_requests(path: Path) -> None:
    clock = InstantClock(ManualClock(5.0))
    kv = KvCacheManager(KvCacheConfig(num_blocks=16, tokens_per_block=4), clock)
    with TraceRecorder(BatchManagerConfig(max_batch_size=4), kv, clock, path) as manager:
        for request_id in (1, 2):
            manager.add_request(Request(request_id, [request_id] * 6, 3))
        while manager.has_work:
            plan = manager.schedule()
            manager.update(plan, [[50 + entry.request.request_id] for entry in plan.scheduled])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), redact=st.booleans())
def test_a_random_run_is_replayed_with_identical_plans(tmp_path: Path, seed: int, redact: bool) -> None:
    path = tmp_path / "run.jsonl"
    record_random_run(path, seed, 150, redact)
    result = replay(path)
    assert result.difference is None, str(result.difference)
    assert result.is_complete


def test_the_random_runs_pause_cancel_time_out_and_stop_in_every_way(tmp_path: Path) -> None:
    runs = [record_random_run(tmp_path / "run.jsonl", seed, 300) for seed in range(30)]
    assert sum(run.num_pauses for run in runs) > 20
    assert set().union(*(run.finish_reasons for run in runs)) == set(FinishReason)


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    record_two_requests(tmp_path / name)
    with TraceReader(tmp_path / name) as reader:
        records = list(reader)
    assert reader.is_complete
    assert reader.header.config == BatchManagerConfig(max_batch_size=4)
    assert reader.header.kv_config == KvCacheConfig(num_blocks=16, tokens_per_block=4)
    arrivals = [record.request.token_ids for record in records if isinstance(record, Arrival)]
    assert arrivals == [[1] * 6, [2] * 6]
    plans = [record for record in records if isinstance(record, Planning)]
    assert [row.num_scheduled_tokens for plan in plans for row in plan.rows] == [6, 6, 1, 1, 1, 1]


def test_a_steady_generation_step_costs_a_few_bytes_per_request(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clock = InstantClock(ManualClock())
    kv = KvCacheManager(KvCacheConfig(num_blocks=1000, tokens_per_block=16), clock)
    with TraceRecorder(BatchManagerConfig(max_batch_size=64), kv, clock, path) as manager:
        for request_id in range(64):
            manager.add_request(Request(request_id, [1, 2, 3], 100))
        while manager.has_work:
            plan = manager.schedule()
            manager.update(plan, [[40_000]] * 64)
    assert path.stat().st_size < 64 * 100 * 12


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (',"rows":[1,2]', ',"rows":[1]', "request 2: the scheduled request was None when recorded, 2 when replayed"),
        ("[1,0,6,0,0,6,0,1", "[1,0,5,0,0,6,0,1", "request 1: num_scheduled_tokens was 5 when recorded, 6"),
        ('"free":12', '"free":11', "free blocks was 11 when recorded, 12 when replayed"),
        ('"ended":[[1,"LENGTH"]', '"ended":[[1,"END_ID"]', "ended requests was"),
        ('"max_batch_size":4', '"max_batch_size":1', "iteration 0, request 2: the scheduled request was 2"),
    ],
)
def test_a_replay_names_the_first_difference(tmp_path: Path, before: str, after: str, complaint: str) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    difference = replay(path).difference
    assert difference is not None
    assert complaint in str(difference)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "line 2: not JSON"),
        ("[1]", "line 2: a JSON object is expected, not list"),
        ('{"t":1,"dance":3}', "line 2: unknown kind of record with the fields dance, t"),
        ('{"t":1,"add":{"id":1}}', "line 2: the request has no field 'prompt'"),
        ('{"t":1,"add":{"id":1,"prompt":[1],"max_new_tokens":1,"colour":2}}', "colour"),
        ('{"t":1,"cancel":1,"reason":"BORED","live":true}', "'BORED' is no FinishReason; expected one of NOT_FINISHED"),
        ('{"t":1,"schedule":0,"rows":[5]}', "line 2: 5 is missing or unknown"),
        ('{"t":1,"update":3,"tokens":[]}', "line 2: iteration 3 is not in flight"),
        ('{"t":1,"change":"config","config":{"speed":9}}', "BatchManagerConfig has no field 'speed'"),
        ('{"end":7}', "line 2: 7 lines were written before this one, 1 are here"),
    ],
)
def test_a_line_that_is_no_record_is_an_error_that_names_it(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    header, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, line + "\n", *rest]))
    with pytest.raises(TraceFormatError, match=complaint.replace("[", r"\[")):
        replay(path)


def test_a_trace_of_another_version_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    path.write_text(path.read_text().replace('"version":1', '"version":2', 1))
    with pytest.raises(TraceVersionError, match="format version 2; this code reads version 1"):
        replay(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5}\n')
    with pytest.raises(TraceError, match="this is no trace"):
        replay(path)


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_trace_that_was_cut_off_is_replayed_up_to_there_and_called_incomplete(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    record_two_requests(path)
    path.write_bytes(path.read_bytes()[:-40])
    result = replay(path)
    assert not result.is_complete
    assert result.difference is None


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    clock = InstantClock(ManualClock())
    kv = KvCacheManager(KvCacheConfig(num_blocks=64, tokens_per_block=4), clock)
    manager = TraceRecorder(BatchManagerConfig(), kv, clock, "/dev/full")
    for request_id in range(8):
        manager.add_request(Request(request_id, list(range(request_id, request_id + 20)), 5))
    while manager.has_work:
        plan = manager.schedule()
        manager.update(plan, [[1] if entry.samples else [] for entry in plan.scheduled])
    with pytest.raises(TraceWriteError, match="/dev/full ends after"):
        manager.close()


def test_compressed_traces_hold_the_same_records(tmp_path: Path) -> None:
    record_two_requests(tmp_path / "run.jsonl")
    record_two_requests(tmp_path / "run.jsonl.gz")
    assert gzip.decompress((tmp_path / "run.jsonl.gz").read_bytes()) == (tmp_path / "run.jsonl").read_bytes()


def test_a_replay_is_watched_like_the_run_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    watcher = CountingObserver()
    replay(path, [watcher])
    assert watcher.calls == ["arrival", "arrival", "schedule", "update", "schedule", "update", "schedule", "update"]


class CountingObserver(Observer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_arrival(self, *_: object) -> None:
        self.calls.append("arrival")

    def on_schedule(self, *_: object) -> None:
        self.calls.append("schedule")

    def on_update(self, *_: object) -> None:
        self.calls.append("update")


QUERIES = {"has_work", "num_waiting", "num_running", "explain", "explain_all", "is_drained"}


def test_every_call_that_changes_a_batch_manager_is_observed() -> None:
    public = {name for name in vars(BatchManager) if not name.startswith("_")}
    assert public - QUERIES == {name for name in vars(ObservedBatchManager) if not name.startswith("_")}


DECISIONS_ASKED_BY_THE_BATCH_MANAGER = {
    "allocate",
    "begin_step",
    "end_step",
    "find_reuse",
    "holding_of",
    "is_current",
    "is_loading",
    "most_growing_blocks",
    "num_fenced_blocks",
    "num_free_blocks",
    "num_held_blocks",
    "num_new_blocks",
    "next_iteration",
    "num_blocks_in_transfer",
    "release",
    "store",
    "store_last_block",
}
LOOKS_AT_THE_CACHE = {"check_invariants", "ledger", "may_have_leaks", "snapshot_events", "stats", "take_events"}


def test_every_call_that_changes_a_kv_cache_from_outside_is_observed() -> None:
    public = {name for kind in KvCacheManager.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}
    observed = {name for name in vars(ObservedKvCacheManager) if not name.startswith("_")} - {"watch"}
    assert public - DECISIONS_ASKED_BY_THE_BATCH_MANAGER - LOOKS_AT_THE_CACHE == observed


def test_a_cache_with_lower_tiers_is_recorded_only_when_it_is_observed(tmp_path: Path) -> None:
    clock = InstantClock(ManualClock())
    kv = KvCacheManager(KvCacheConfig(num_blocks=16, tokens_per_block=4, host_blocks=4), clock)
    with pytest.raises(TraceError, match="has to be an ObservedKvCacheManager"):
        TraceRecorder(BatchManagerConfig(), kv, clock, tmp_path / "run.jsonl")


@pytest.mark.parametrize("redact", [False, True])
def test_what_passes_between_instances_is_recorded_and_replayed(tmp_path: Path, redact: bool) -> None:
    """One context comes with the request, one is found at a peer while the request is held, one is given up."""
    path = tmp_path / "run.jsonl"
    clock = InstantClock(ManualClock())
    kv = ObservedKvCacheManager(KvCacheConfig(num_blocks=32, tokens_per_block=4), clock)
    with TraceRecorder(BatchManagerConfig(), kv, clock, path, redact=redact) as manager:
        handed_over = Request(1, list(range(10)), 4, generated_token_ids=[77], num_remote_tokens=10)
        found, given_up = Request(2, [2] * 9, 3), Request(3, [3] * 9, 3, num_remote_tokens=9)
        manager.add_request(handed_over)
        manager.add_request(found, WaitCode.REMOTE_KV)
        manager.add_request(given_up)
        kv.expect_remote_load(found, 8)
        kv.expect_remote_load(given_up, 0)
        manager.release_hold(2)
        plan = manager.schedule()
        assert kv.take_remote_loads() == [handed_over, found]
        with pytest.raises(BlockOwnershipError, match="waits for blocks of another instance already"):
            kv.expect_remote_load(found, 0)
        leases = [kv.lease(request, "context") for request in (handed_over, found)]
        manager.update(plan, [[5]])
        for request, lease_id in zip((handed_over, found), leases, strict=True):
            kv.acknowledge_remote_load(request)
            kv.end_lease(lease_id)
        while manager.has_work:
            plan = manager.schedule()
            manager.update(plan, [[5]] * len(plan.scheduled))
        leased = kv.lease_prefix(Request(0, [2] * 9, 1), "prefix for another instance")
        assert leased is not None
        kv.end_lease(leased[0])
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.num_requests == 3


def test_a_call_of_the_cache_that_answers_otherwise_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clock = InstantClock(ManualClock())
    kv = ObservedKvCacheManager(KvCacheConfig(num_blocks=16, tokens_per_block=4), clock)
    with TraceRecorder(BatchManagerConfig(), kv, clock, path) as manager:
        request = Request(1, [1] * 6, 1)
        manager.add_request(request)
        manager.schedule()
        kv.end_lease(kv.lease(request, "a peer"))
    text = path.read_text()
    lease = text.split('"args":[1,"a peer"],"result":')[1].split("}")[0]
    path.write_text(text.replace(f'"a peer"],"result":{lease}', '"a peer"],"result":99'))
    assert "the result of lease was 99 when recorded" in str(replay(path).difference)
    path.write_text(text.replace('"kv":"lease"', '"kv":"borrow"'))
    with pytest.raises(TraceFormatError, match=r"borrow.* is no call of a KvCacheManager"):
        replay(path)


def test_a_failed_load_from_a_lower_tier_and_its_restart_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clock = InstantClock(ManualClock())
    kv = ObservedKvCacheManager(KvCacheConfig(num_blocks=8, tokens_per_block=4, host_blocks=16), clock)
    num_restarted = 0
    with TraceRecorder(BatchManagerConfig(max_batch_size=4), kv, clock, path) as manager:
        for request_id, token in enumerate((1, 2, 3, 1)):
            manager.add_request(Request(request_id, [token] * 20, 4))
            while manager.has_work:
                plan = manager.schedule()
                manager.update(plan, [[9] if entry.samples else [] for entry in plan.scheduled])
                for order in kv.take_transfers():
                    is_load = order.target_tier is CacheTier.DEVICE
                    disappointed = kv.acknowledge_transfer(order.transfer_id, not is_load)
                    num_restarted += len(disappointed)
                    manager.restart(disappointed)
    assert num_restarted > 0
    result = replay(path)
    assert result.difference is None, str(result.difference)
