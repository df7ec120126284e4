"""From our KV cache events to those that Dynamo's routers index.

```
 stored(parent, [blocks])      ─► stored: token ids and hashes of its full blocks
 removed([hashes])             ─► removed: those that were told
 updated, created              ─► nothing: a block in a lower tier is still found
 overflow                      ─► removed: everything that was told, since nobody knows what of it is left
```
Routers hash the token ids themselves to match prompts; our hashes only name blocks, as parents and when they go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from batch_manager.kv.keys import Namespace, block_digest, namespace_digest
from executor.api.kv_cache import (
    KVCacheEvent,
    KVCacheOverflowData,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)

_logger = logging.getLogger(__name__)


class KvEventBatches:
    """Turns events into batches for `KvEventPublisher.publish_batch`. Remembers which blocks were told."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._told: set[int] = set()

    def take(self, events: Iterable[KVCacheEvent]) -> list[dict[str, Any]]:
        """One batch, in the order of the events."""
        batch: list[dict[str, Any]] = []
        for event in events:
            match event.data:
                case KVCacheStoredData():
                    batch += self._stored(event.data)
                case KVCacheRemovedData(block_hashes):
                    batch += self._removed(block_hashes)
                case KVCacheOverflowData(num_lost):
                    _logger.warning("%d KV cache events were lost; routers forget this instance's blocks", num_lost)
                    batch += self._removed(list(self._told))
        return batch

    def _stored(self, data: KVCacheStoredData) -> list[dict[str, Any]]:
        """Blocks up to the first one that routers cannot use: one that is not full, or is for some requests only."""
        if data.parent_hash is None:
            is_shared = bool(data.blocks) and _is_shared(data.blocks[0])
        else:
            is_shared = data.parent_hash in self._told
        if not is_shared:
            return []
        blocks: list[KVCacheStoredBlockData] = []
        for block in data.blocks:
            if len(block.tokens) < self._tokens_per_block or block.lora_id is not None or block.mm_keys:
                break
            blocks.append(block)
        if not blocks:
            return []
        self._told.update(block.block_hash for block in blocks)
        return [
            {
                "type": "stored",
                "token_ids": [token.token_id for block in blocks for token in block.tokens],
                "num_block_tokens": [len(block.tokens) for block in blocks],
                "block_hashes": [_signed(block.block_hash) for block in blocks],
                "parent_hash": None if data.parent_hash is None else _signed(data.parent_hash),
            }
        ]

    def _removed(self, block_hashes: list[int]) -> list[dict[str, Any]]:
        told = [block_hash for block_hash in block_hashes if block_hash in self._told]
        self._told.difference_update(told)
        return [{"type": "removed", "block_hashes": list(map(_signed, told))}] if told else []


def _is_shared(first: KVCacheStoredBlockData) -> bool:
    """Whether the first block of a prompt is found by requests without a salt: events name salts by their effect only,
    as salted blocks have other hashes."""
    tokens = tuple(token.token_id for token in first.tokens)
    digest = block_digest(namespace_digest(Namespace()), tokens)
    return first.block_hash == int.from_bytes(digest[:8], "big")


def _signed(unsigned: int) -> int:
    """The same 64 bits as a signed integer."""
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
