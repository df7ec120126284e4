"""What must be the same before blocks are exchanged, and what proves afterwards that they came whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_build.engine_dir import TOKENIZER_DIR, EngineDirectory

BLOCKS_PER_CHECKSUM = 4
"""A checksum covers so many blocks: few enough that a damaged one is found early, many enough to cost little."""


_WEIGHTS_SUFFIX = ".data"
"""Of files of an engine directory that hold weights."""


class IdentityError(ValueError):
    """Two instances do not run the same thing: says what differs."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What keys and values mean."""

    config_digest: bytes
    """SHA-256 over the model's configuration."""
    weights_digest: bytes
    """SHA-256 over the checksums of the weights, as the engine directory's manifest has them."""
    compute_dtype: str

    @staticmethod
    def of(engine_dir: EngineDirectory) -> ModelIdentity:
        config = json.dumps(asdict(engine_dir.model_config), sort_keys=True, default=str)
        return ModelIdentity(
            hashlib.sha256(config.encode()).digest(),
            _weights_digest(engine_dir),
            engine_dir.build_config.dtype,
        )

    def check_same(self, other: ModelIdentity) -> None:
        """Raises `IdentityError` unless `other`, the peer's, is equal."""
        if self.config_digest != other.config_digest:
            raise IdentityError("the instances run models of different configurations")
        if self.weights_digest != other.weights_digest:
            raise IdentityError("the instances run the same network with different weights")
        if self.compute_dtype != other.compute_dtype:
            raise IdentityError(f"this instance computes in {self.compute_dtype}, the other in {other.compute_dtype}")


def _weights_digest(engine_dir: EngineDirectory) -> bytes:
    """SHA-256 over the checksums of the files that hold weights: those of the network, or compiled plans."""
    records = engine_dir.manifest.files
    names = [name for name in records if name.endswith(_WEIGHTS_SUFFIX)]
    names = names or [name for name in records if not name.startswith(f"{TOKENIZER_DIR}/")]
    return hashlib.sha256("".join(records[name].sha256 for name in sorted(names)).encode()).digest()


def prompt_digest(token_ids: Sequence[int], cache_salt: int | None) -> bytes:
    """[32] BLAKE2b over a prompt and its cache namespace: a context belongs to one prompt only."""
    digest = hashlib.blake2b(b"" if cache_salt is None else f"salt {cache_salt}".encode(), digest_size=32)
    digest.update(np.asarray(token_ids, np.int64).tobytes())
    return digest.digest()


def checksums(regions: Sequence[NDArray[np.uint8]], block_ids: Sequence[int]) -> list[int]:
    """XXH3-64 of each group of `BLOCKS_PER_CHECKSUM` blocks.

    Args:
        regions: the pool, `[num_blocks, bytes]` each.
        block_ids: in the order of their tokens.

    A group's bytes are taken region by region, in a region block by block, so that runs of neighbouring blocks are
    read in one go.
    """
    return [
        _checksum(regions, block_ids[begin : begin + BLOCKS_PER_CHECKSUM])
        for begin in range(0, len(block_ids), BLOCKS_PER_CHECKSUM)
    ]


def _checksum(regions: Sequence[NDArray[np.uint8]], group: Sequence[int]) -> int:
    runs = [(first, first + length) for _, first, length in contiguous_runs(group)]
    digest = xxhash.xxh3_64()
    for region in regions:
        for first, last in runs:
            digest.update(region[first:last].reshape(-1).data)
    return digest.intdigest()


def contiguous_runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of ascending neighbours: (index of the first in `block_ids`, its id, length)."""
    runs: list[tuple[int, int, int]] = []
    for index, block_id in enumerate(block_ids):
        if runs and block_id == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((index, block_id, 1))
    return runs
