"""What a server process with a real engine tells beside tokens: receipts, prompt log probabilities, retention."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from batch_manager.request import FinishReason
from executor.api.request import KvCacheRetentionConfig
from executor.client import Finished, InferenceClient
from executor.client.errors import CallError
from protos.inflight.v1 import control_pb2, inference_pb2
from tests.serving.server_process import serving
from tests.serving.tiny_engine_dir import build_tiny_engine

PROMPT = "a prompt of several KV cache blocks, long enough to be found again; " * 2


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceClient]:
    engine_dir = build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")
    with serving(engine_dir, "--log_level", "error") as (_, target), InferenceClient(target) as opened:
        yield opened


def finished(client: InferenceClient, **fields: object) -> Finished:
    *_, last = client.generate(PROMPT, max_tokens=8, ignore_eos=True, timeout=60, **fields)  # type: ignore[arg-type]
    assert isinstance(last, Finished)
    return last


def receipt(client: InferenceClient, request_id: str) -> control_pb2.OutputReceipt:
    """Of a request that has ended, or is about to."""
    deadline = time.monotonic() + 10
    while True:
        try:
            (output,) = client.receipt(request_id, timeout=10)
        except CallError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return output


def test_a_receipt_accounts_for_every_token(client: InferenceClient) -> None:
    cold = finished(client, request_id="cold", cache_salt_id=1)
    warm = finished(client, request_id="warm", cache_salt_id=1)
    assert cold.usage.reused_tokens == 0
    for name, usage in (("cold", cold.usage), ("warm", warm.usage)):
        told = receipt(client, name)
        assert (told.num_prompt_tokens, told.num_generated_tokens) == (usage.prompt_tokens, 8)
        assert told.num_reused_tokens == usage.reused_tokens
        assert told.num_reused_tokens + told.num_computed_tokens == usage.prompt_tokens + 8 - 1
        assert told.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert not told.error
        assert 0 <= told.queue_seconds <= told.total_seconds
        assert told.block_seconds > 0
    assert warm.usage.reused_tokens > 0


def test_a_cancelled_request_has_a_receipt_too(client: InferenceClient) -> None:
    with client.generate(PROMPT, ignore_eos=True, request_id="left", timeout=60) as generation:
        next(iter(generation))
    told = receipt(client, "left")
    assert told.finish_reason in (inference_pb2.FINISH_REASON_CANCELLED, inference_pb2.FINISH_REASON_LENGTH)
    assert told.num_generated_tokens <= 256


def test_prompt_log_probs_are_the_same_with_a_warm_cache(client: InferenceClient) -> None:
    first = finished(client, return_prompt_log_probs=True)
    again = finished(client, return_prompt_log_probs=True)
    assert len(first.prompt_log_probs) == first.usage.prompt_tokens - 1
    assert all(log_prob <= 0 for log_prob in first.prompt_log_probs)
    assert again.prompt_log_probs == pytest.approx(first.prompt_log_probs, abs=1e-4)
    assert not finished(client).prompt_log_probs


def test_a_retention_that_is_worth_nothing_changes_no_output(client: InferenceClient) -> None:
    part = KvCacheRetentionConfig.TokenRangeRetentionConfig
    retention = KvCacheRetentionConfig([part(0, 16, 100, 60_000), part(16, None, 0)], decode_retention_priority=0)
    plain = list(client.generate(PROMPT, max_tokens=8, ignore_eos=True, timeout=60))
    kept = list(client.generate(PROMPT, max_tokens=8, ignore_eos=True, timeout=60, kv_cache_retention_config=retention))
    assert "".join(event.text for event in plain[1:-1]) == "".join(event.text for event in kept[1:-1])
    assert isinstance(kept[-1], Finished)
    assert kept[-1].finish_reason is FinishReason.LENGTH
