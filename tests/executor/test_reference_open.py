"""The reference target from a checkpoint to an open engine, and what is said where torch is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.targets.select import select_target
from executor.api.errors import UnsupportedFeatureError
from executor.engines.open import open_engine
from executor.engines.reference import ReferenceEngine
from tests.engine_build.tiny_checkpoint import TinyCheckpoint
from tests.executor.hand_fed import Piece, pack
from tests.executor.tiny_engine import transformers_logits, transformers_model

TOKENS_PER_BLOCK = 5


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    checkpoint, target = TinyCheckpoint(), select_target("reference")
    build_config = resolve_build_config(
        checkpoint.config, target, max_seq_len=64, tokens_per_block=TOKENS_PER_BLOCK, dtype="float32"
    )
    build_engine(checkpoint, build_config, target, tmp_path / "engine")
    return tmp_path / "engine"


def test_an_engine_directory_built_for_the_reference_opens_with_its_own_block_size(engine_dir: Path) -> None:
    engine = open_engine(engine_dir, num_blocks=9)
    assert isinstance(engine, ReferenceEngine)
    assert engine.spec.tokens_per_block == TOKENS_PER_BLOCK
    token_ids = list(range(40, 62))
    logits = engine.execute(pack([Piece(token_ids, 0, 22, [8, 0, 3, 5, 1])], TOKENS_PER_BLOCK))
    expected = transformers_logits(transformers_model(TinyCheckpoint()), token_ids)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


def test_without_torch_one_line_says_what_to_install(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("executor.engines.reference")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedFeatureError, match=r"needs the package torch: pip install"):
        open_engine(engine_dir, num_blocks=9)
