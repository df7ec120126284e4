"""The real model: where a prefix was cached, and where it has been meanwhile, does not show in what follows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_build.checkpoint import open_checkpoint
from executor import Executor, ExecutorConfig, KvCacheConfig, OutputConfig, Request
from executor.kv_tiers.disk_pool import slot_bytes
from tests.parity.chat_prompts import chat_token_ids
from tests.parity.smollm2 import Variant, build_smollm2

pytestmark = pytest.mark.model

PROMPT_TOKENS = 68
"""Two blocks of 32 tokens and a bit: cut points at, before and behind block boundaries."""
NUM_TOKENS = 2
POOL_BLOCKS = 24
"""So few that what one group of requests leaves is evicted by the next."""
TIERS = {"device": (256, 0, 0), "host": (POOL_BLOCKS, 256, 0), "disk": (POOL_BLOCKS, 0, 256)}
"""Name -> blocks in the pool, in main memory, on disk."""
CUTS = {
    "device": range(1, PROMPT_TOKENS + 1),
    "host": range(32, PROMPT_TOKENS + 1),
    "disk": range(32, PROMPT_TOKENS + 1),
}
"""Parts of blocks are found in the pool only: below it, cut points before the first block's end find nothing."""

Output = tuple[list[int], NDArray[np.float32]]


@pytest.fixture(scope="module")
def engine_dir(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "engine"
    return build_smollm2(demo_model_path, Variant("openvino", "float32"), directory)


@pytest.fixture(scope="module")
def text(demo_model_path: Path) -> list[int]:
    """Token ids of chat prompts, one behind the other."""
    return [token for prompt in chat_token_ids(open_checkpoint(demo_model_path)) for token in prompt]


@contextmanager
def opened(
    engine_dir: Path, disk_dir: Path, tiers: tuple[int, int, int], *, reuse: bool = True, deterministic: bool = True
) -> Iterator[Executor]:
    pool_blocks, host_blocks, disk_blocks = tiers
    block_bytes = 2 * 30 * 3 * 64 * 32 * 4
    kv = KvCacheConfig(
        enable_block_reuse=reuse,
        max_tokens=pool_blocks * 32,
        host_cache_size=host_blocks * block_bytes,
        disk_cache_size=disk_blocks * slot_bytes(block_bytes),
        disk_cache_dir=str(disk_dir),
    )
    with Executor(engine_dir, ExecutorConfig(kv_cache_config=kv, deterministic=deterministic)) as executor:
        assert executor.spec.kv_bytes_per_block == block_bytes
        yield executor


def run(executor: Executor, requests: list[Request]) -> list[Output]:
    outputs = []
    for (response,) in executor.await_responses(executor.enqueue_requests(requests)):
        result = response.result
        logits = result.generation_logits
        outputs.append((result.output_token_ids[0], np.zeros(0, np.float32) if logits is None else logits[0]))
    return outputs


def request(prompt: list[int], num_tokens: int, salt: int, *, logits: bool = True) -> Request:
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=logits)
    return Request(prompt, num_tokens, output_config=output, cache_salt_id=salt)


@pytest.fixture(scope="module")
def expected(engine_dir: Path, text: list[int], tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Of the whole prompt, with nothing cached."""
    with opened(engine_dir, tmp_path_factory.mktemp("disk"), TIERS["device"], reuse=False) as executor:
        return run(executor, [request(text[:PROMPT_TOKENS], NUM_TOKENS, 0)])[0]


@pytest.mark.parametrize("where", TIERS)
def test_every_cut_point_gives_bit_equal_logits_wherever_the_prefix_was(
    engine_dir: Path, text: list[int], tmp_path: Path, expected: Output, where: str
) -> None:
    """Salts keep the cut points apart: each finds its own prefix only."""
    cuts = CUTS[where]
    tokens, logits = expected
    with opened(engine_dir, tmp_path, TIERS[where]) as executor:
        run(executor, [request(text[:cut], 1, cut, logits=False) for cut in cuts])
        outputs = run(executor, [request(text[:PROMPT_TOKENS], NUM_TOKENS, cut) for cut in cuts])
        for cut, output in zip(cuts, outputs, strict=True):
            assert output[0] == tokens, f"cut {cut}"
            np.testing.assert_array_equal(output[1], logits, err_msg=f"cut {cut}")
        ledger = executor.kv_ledger()
        stats = executor._kv.stats()
    assert ledger.failed_transfers == 0
    if where == "device":
        assert stats.reused_blocks == sum(cut // 32 for cut in cuts)
    else:
        assert ledger.onboarded_blocks > sum(cut // 32 for cut in cuts) // 2


def test_random_shared_prefixes_under_eviction_pressure_give_the_same_tokens(
    engine_dir: Path, text: list[int], tmp_path: Path
) -> None:
    """32 requests continue one another at random points, in a pool that holds a few of them, over host and disk."""
    source = random.Random(4)
    prompts: list[list[int]] = [text[:100]]
    for index in range(31):
        beginning = source.choice(prompts)
        prompts.append(
            beginning[: source.randint(10, len(beginning))] + text[200 + 9 * index :][: source.randint(5, 40)]
        )
    prompts = [prompt[:150] for prompt in prompts]
    requests = [request(prompt, 4, 0, logits=False) for prompt in prompts]
    with opened(engine_dir, tmp_path / "a", TIERS["device"], reuse=False, deterministic=False) as executor:
        expected = [tokens for tokens, _ in run(executor, requests)]
    with opened(engine_dir, tmp_path / "b", (12, 24, 200), deterministic=False) as executor:
        for _ in range(2):
            assert [tokens for tokens, _ in run(executor, requests)] == expected
        ledger = executor.kv_ledger()
        evictions = executor._kv.stats().num_evictions
    assert evictions > 20
    assert ledger.onboarded_blocks > 10
    assert ledger.disk.used_blocks > 0
    assert (ledger.failed_transfers, ledger.counts.used) == (0, 0)
