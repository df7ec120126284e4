"""What is received in 8 bits is what OpenVINO would have kept itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batch_manager import Request
from executor.transfer.layout import dequantize_rows, to_rows
from executor.transfer.local_network import LocalNetwork
from tests.executor.driving import request, run_one
from tests.serving.tiny_engine_dir import build_tiny_engine
from tests.transfer.instances import instance, run_disaggregated

PROMPT = list(range(64))


@pytest.fixture(scope="module")
def openvino_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


def test_float32_becomes_what_the_engine_quantizes_to(openvino_dir: Path) -> None:
    network = LocalNetwork()
    with (
        instance(openvino_dir, network) as context,
        instance(openvino_dir, network, kv_cache_dtype="uint8") as received,
        instance(openvino_dir, network, kv_cache_dtype="uint8") as computed,
    ):
        run_disaggregated(context, received, request(PROMPT, 2))
        run_one(computed, request(PROMPT, 2))
        stats = received.get_transfer_stats()
        assert stats is not None
        assert stats.num_received_tokens == 64
        rows = [first_blocks(executor) for executor in (received, computed)]
    difference = np.abs(rows[0] - rows[1])
    step = (rows[1].max(-1, keepdims=True) - rows[1].min(-1, keepdims=True)) / 255
    # The first layer's keys and values come from the same numbers; later layers see those of 8 bits, or of float32.
    assert (difference[0] <= 1.1 * step[0] + 1e-6).all()


def first_blocks(executor) -> np.ndarray:  # type: ignore[no-untyped-def, type-arg]
    """Rows of the prompt's blocks, `[layers, 2, heads, tokens, head_size]`."""
    with executor._loop.batch_manager_lock:
        block_ids = executor._kv.find_reuse(Request(0, [*PROMPT, 1], 1)).block_ids
        blocks = np.stack([executor._engine.read_block(block_id) for block_id in block_ids])
    assert len(blocks) == 2
    return dequantize_rows(to_rows(blocks, executor._transfers.layout))
