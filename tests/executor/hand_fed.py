"""Steps packed by hand: which rows of which sequences an engine is fed, for tests that need no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from executor.engines.interface import StepInputs


class Piece(NamedTuple):
    """Positions `begin` to `end` of a sequence whose tokens and block table are given whole."""

    token_ids: Sequence[int]
    begin: int
    end: int
    block_ids: Sequence[int]


def pack(pieces: Sequence[Piece], tokens_per_block: int, sampled_rows: Sequence[int] | None = None) -> StepInputs:
    """Step inputs for the pieces, one behind the other; every row is sampled unless `sampled_rows` says which."""
    tables = [list(piece.block_ids[: -(-piece.end // tokens_per_block)]) for piece in pieces]
    num_rows = sum(piece.end - piece.begin for piece in pieces)
    return StepInputs(
        input_ids=np.array([token for piece in pieces for token in piece.token_ids[piece.begin : piece.end]], np.int64),
        position_ids=np.array([p for piece in pieces for p in range(piece.begin, piece.end)], np.int64),
        past_lens=np.array([piece.begin for piece in pieces], np.int32),
        subsequence_begins=np.cumsum([0, *(piece.end - piece.begin for piece in pieces)], dtype=np.int32),
        block_indices=np.array([block for table in tables for block in table], np.int32),
        block_indices_begins=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        sampled_rows=np.array(range(num_rows) if sampled_rows is None else sampled_rows, np.int64),
    )
