"""Deterministic mode on real weights, whose matrices are large enough for the kernels that serve them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from executor.engines.interface import Engine
from executor.engines.open import open_engine
from tests.executor.hand_fed import Piece, pack
from tests.parity.smollm2 import Variant, build_smollm2

pytestmark = pytest.mark.model

LENGTH = 120
GENERATOR = np.random.default_rng(4)
TOKENS, OTHER_TOKENS = (GENERATOR.integers(100, 40_000, LENGTH).tolist() for _ in range(2))
TABLE, MOVED, ELSEWHERE = [0, 1, 2, 3], [9, 4, 11, 6], [12, 8, 14, 10]

VARIANTS = [
    (Variant("openvino", "float32"), "float32"),
    (Variant("openvino", "bfloat16"), "bfloat16"),
    (Variant("openvino", "bfloat16", "int8"), "bfloat16"),
    (Variant("openvino", "bfloat16"), "uint8"),
]


@pytest.mark.parametrize(("variant", "kv_cache_dtype"), VARIANTS, ids=[f"{v}, {kv} cache" for v, kv in VARIANTS])
def test_logits_are_bit_equal_alone_batched_chunked_decoded_and_verified(
    variant: Variant, kv_cache_dtype: str, demo_model_path: Path, tmp_path: Path
) -> None:
    engine = open_engine(
        build_smollm2(demo_model_path, variant, tmp_path / "engine"),
        num_blocks=16,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=True,
    )
    alone = feed(engine, 0, LENGTH, TABLE)
    ways = {
        "in company": [(0, LENGTH)],
        "in chunks of 7": chunks(7),
        "in chunks of 33": chunks(33),
        "decoded with one row replayed": [(0, 100), *((end - 2, end) for end in range(101, LENGTH + 1))],
        "verified in fives, three rejected": [(0, 90), *((begin, begin + 5) for begin in range(90, LENGTH - 4, 2))],
    }
    company = itertools.cycle((2, 0, 19, 70))
    for way, pieces in ways.items():
        for begin, end in pieces:
            beside = next(company)
            logits = feed(engine, begin, end, MOVED, beside)
            message = f"{way}: positions {begin} to {end}, {beside} rows beside them"
            np.testing.assert_array_equal(logits, alone[begin:end], err_msg=message)
    engine.close()


def chunks(size: int) -> list[tuple[int, int]]:
    """The last one begins earlier where it would have one row only."""
    return [(min(begin, LENGTH - 2), min(begin + size, LENGTH)) for begin in range(0, LENGTH, size)]


def feed(engine: Engine, begin: int, end: int, table: list[int], company: int = 0) -> NDArray[np.float32]:
    """Logits of positions `begin` to `end`, with `company` rows of another sequence in the same step."""
    pieces = [Piece(TOKENS, begin, end, table)]
    if company:
        pieces.insert(0, Piece(OTHER_TOKENS, 0, company, ELSEWHERE))
    return engine.execute(pack(pieces, 32, range(company, company + end - begin))).copy()
