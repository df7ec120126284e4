"""The bytes of KV blocks below the device, and what moves them. See README.md."""

from executor.kv_tiers.errors import BlockLostError
from executor.kv_tiers.mover import BlockMover, FinishedTransfer
from executor.kv_tiers.open import open_mover
from executor.kv_tiers.stores import BlockStore, DeviceStore, HostPool

__all__ = [
    "BlockLostError",
    "BlockMover",
    "BlockStore",
    "DeviceStore",
    "FinishedTransfer",
    "HostPool",
    "open_mover",
]
