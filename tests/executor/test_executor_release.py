"""An Executor that cannot be opened keeps nothing: the same process can open another one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from executor import Executor, ExecutorConfig, KvCacheConfig
from executor.api.kv_cache_config import CacheTransceiverConfig
from executor.engines.reference import ReferenceEngine
from tests.executor.driving import request, run_one


@pytest.mark.parametrize("fault", ["a trace that cannot be written", "a port that is taken"])
def test_what_was_opened_before_a_failure_is_released(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    closed: list[object] = []
    close = ReferenceEngine.close
    monkeypatch.setattr(ReferenceEngine, "close", lambda engine: (closed.append(engine), close(engine)))
    kv = KvCacheConfig(max_tokens=64, disk_cache_size=400_000, disk_cache_dir=tmp_path / "blocks")
    good = ExecutorConfig(kv_cache_config=kv, trace_path=tmp_path / "run.jsonl")
    with socket.socket() as taken:
        bad = ExecutorConfig(kv_cache_config=kv, trace_path=tmp_path)
        if fault == "a port that is taken":
            pytest.importorskip("nixl_cu12")
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            bad = ExecutorConfig(
                kv_cache_config=kv,
                cache_transceiver_config=CacheTransceiverConfig(listen=address),
            )
        with pytest.raises(OSError):
            Executor(tiny_engine_dir, bad)
    assert len(closed) == 1
    with Executor(tiny_engine_dir, good) as executor:
        assert len(run_one(executor, request([5, 6, 7])).output_token_ids[0]) > 0
    assert len(closed) == 2
