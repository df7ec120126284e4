"""KV cache bookkeeping: block pool, reuse tree, retention, eviction. Knows block ids and token ids, never bytes."""

from batch_manager.kv.block import NO_BLOCK
from batch_manager.kv.config import KvCacheConfig
from batch_manager.kv.errors import (
    BlockOwnershipError,
    InvalidKvCacheConfigError,
    KvCacheError,
    KvInvariantError,
    StaleReuseError,
    StepOrderError,
)
from batch_manager.kv.eviction import EvictionStrategy
from batch_manager.kv.manager import KvCacheManager
from batch_manager.kv.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.kv.reuse import PartialReuse, Reuse

__all__ = [
    "NO_BLOCK",
    "BlockOwnershipError",
    "EvictionStrategy",
    "InvalidKvCacheConfigError",
    "KvCacheConfig",
    "KvCacheError",
    "KvCacheManager",
    "KvCacheRetentionConfig",
    "KvInvariantError",
    "PartialReuse",
    "Reuse",
    "StaleReuseError",
    "StepOrderError",
    "TokenRangeRetentionConfig",
]
