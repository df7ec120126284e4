"""KV cache bookkeeping: block pool, reuse tree, retention, eviction. Knows block ids and token ids, never bytes."""

from batch_manager.kv.block import NO_BLOCK, num_held
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import (
    BlockOwnershipError,
    InvalidKvCacheConfigError,
    KvCacheError,
    KvInvariantError,
    PinError,
    PinQuotaError,
    StaleReuseError,
    StepOrderError,
)
from batch_manager.kv.events import CacheTier, KvCacheEvent, KvCacheMirror
from batch_manager.kv.eviction import EvictionStrategy
from batch_manager.kv.ledger import BlockCounts, Leak, Ledger, LedgerEntry, OwnerKind
from batch_manager.kv.manager import KvCacheManager
from batch_manager.kv.pins import Pin, PinnedPath
from batch_manager.kv.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.kv.reuse import PartialReuse, Reuse
from batch_manager.kv.stats import KvCacheStats, TierStats
from batch_manager.kv.transfers import BlockTransfer

__all__ = [
    "NO_BLOCK",
    "BlockCounts",
    "BlockOwnershipError",
    "BlockTransfer",
    "CacheTier",
    "EvictionStrategy",
    "InvalidKvCacheConfigError",
    "KvCacheConfig",
    "KvCacheError",
    "KvCacheEvent",
    "KvCacheManager",
    "KvCacheMirror",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvInvariantError",
    "Leak",
    "Ledger",
    "LedgerEntry",
    "OwnerKind",
    "PartialReuse",
    "Pin",
    "PinError",
    "PinQuotaError",
    "PinnedPath",
    "Reuse",
    "StaleReuseError",
    "StepOrderError",
    "TierStats",
    "TokenRangeRetentionConfig",
    "num_held",
]
