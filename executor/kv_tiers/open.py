"""Opens the tiers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from batch_manager.kv import CacheTier
from executor.engines.interface import Engine
from executor.kv_tiers.disk_pool import DiskPool
from executor.kv_tiers.mover import BlockMover
from executor.kv_tiers.stores import BlockStore, DeviceStore, HostPool


def open_mover(engine: Engine, host_blocks: int, disk_blocks: int, disk_dir: str | Path | None) -> BlockMover | None:
    """Allocate the tiers below the device; `None` when there are none.

    Args:
        engine: whose pool is the device tier.
        host_blocks: slots in main memory.
        disk_blocks: slots on disk.
        disk_dir: where those are; needed with `disk_blocks`.

    Raises:
        InvalidRequestError: `disk_dir` is in use, cannot be written, or has no space.
    """
    bytes_per_block = engine.spec.kv_bytes_per_block
    stores: dict[CacheTier, BlockStore] = {CacheTier.DEVICE: DeviceStore(engine)}
    if host_blocks:
        stores[CacheTier.HOST] = HostPool(host_blocks, bytes_per_block)
    if disk_blocks:
        assert disk_dir is not None, "checked with the configuration"
        stores[CacheTier.DISK] = DiskPool(Path(disk_dir), disk_blocks, bytes_per_block)
    return BlockMover(stores, bytes_per_block) if len(stores) > 1 else None
