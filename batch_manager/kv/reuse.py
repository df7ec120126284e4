"""What of a request's tokens is in the cache already."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from batch_manager.kv.block import CachedBlock


class PartialReuse(NamedTuple):
    """The first `num_tokens` positions of block `source` are what the request needs next."""

    source: int
    num_tokens: int
    node: CachedBlock


class Reuse(NamedTuple):
    """Answer of `find_reuse`; good until blocks are evicted or move (`KvCacheManager.is_current`).

    At most `len(token_ids) - 1` tokens: the last one is always computed, for its logits.
    """

    num_tokens: int
    block_ids: list[int]
    """Blocks found whole, in the order of the block table. `NO_BLOCK`: out of the attention window, or in a lower tier,
    to be brought back into a new block."""
    partial: PartialReuse | None
    first_missing_key: Hashable | None
    """Identity of the first full block of the request's tokens that is not in the cache: equal for two requests exactly
    when they would compute the same block behind the same prefix. None when no full block is missing."""
    path: list[CachedBlock]
    num_changes: int
    """The pool's count when this was true."""


NO_REUSE = Reuse(0, [], None, None, [], 0)
