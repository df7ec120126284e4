"""Whole engines on a GPU against the reference on the CPU: the same greedy tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.interface import TensorRtOptions
from engine_build.targets.select import select_target
from executor.engines.open import open_engine
from executor.engines.reference import ReferenceEngine
from executor.engines.reference_cuda_graphs import CudaRecorder
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.tiny_engine import engine_spec, reference_engine, write_tiny_network
from tests.kernels.interpreted_engine import PROMPTS
from tests.parity.greedy import greedy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_reference_gives_the_same_tokens_on_a_gpu_in_float32(deterministic: bool, tmp_path: Path) -> None:
    model_path = write_tiny_network(TinyCheckpoint(), tmp_path)
    expected = greedy(reference_engine(model_path, tiny_config()), PROMPTS, 40)
    engine = ReferenceEngine(model_path, engine_spec(tiny_config()), 64, device="cuda", deterministic=deterministic)
    assert greedy(engine, PROMPTS, 40) == expected


def test_the_reference_gives_the_same_tokens_when_its_generation_steps_are_recorded(tmp_path: Path) -> None:
    model_path = write_tiny_network(TinyCheckpoint(), tmp_path)
    expected = greedy(reference_engine(model_path, tiny_config()), PROMPTS, 40)
    recorder = CudaRecorder(torch.device("cuda"))
    engine = ReferenceEngine(model_path, engine_spec(tiny_config()), 64, device="cuda", recorder=recorder)
    engine.warm_up()
    assert greedy(engine, PROMPTS, 40) == expected


@pytest.mark.parametrize("target_name", ["tensorrt", "tensorrt-rtx"])
def test_a_plan_gives_nearly_all_tokens_of_the_reference(target_name: str, tmp_path: Path) -> None:
    """In float16, where the two best logits may tie: not one in ten tokens may differ."""
    module = target_name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the package {module}")
    checkpoint = TinyCheckpoint(tiny_config(dtype="float16", head_size=64, num_hidden_layers=2))
    target = select_target(target_name)
    config = resolve_build_config(
        checkpoint.config,
        target,
        max_batch_size=4,
        max_num_tokens=64,
        max_seq_len=128,
        tokens_per_block=16,
        dtype="float16",
        tensorrt=TensorRtOptions(),
    )
    build_engine(checkpoint, config, target, tmp_path / "engine", lambda *_: None)
    engine = open_engine(tmp_path / "engine", num_blocks=64)
    engine.warm_up()
    tokens = greedy(engine, PROMPTS, 24)
    engine.close()
    reference = reference_engine(
        write_tiny_network(checkpoint, tmp_path, "float16"), checkpoint.config, kv_cache_dtype="float16"
    )
    pairs = [
        (ours, theirs)
        for mine, expected in zip(tokens, greedy(reference, PROMPTS, 24), strict=True)
        for ours, theirs in zip(mine, expected, strict=True)
    ]
    assert sum(ours != theirs for ours, theirs in pairs) < len(pairs) / 10
