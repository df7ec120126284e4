"""Between `inflight.v1` transfer messages and our own types. No logic beyond that."""

from __future__ import annotations

from executor.transfer.integrity import ModelIdentity
from executor.transfer.layout import KvLayout
from executor.transfer.transport import PoolMemory, Region
from protos.inflight.v1 import transfer_pb2 as pb


def identity_message(identity: ModelIdentity) -> pb.ModelIdentity:
    return pb.ModelIdentity(
        config_digest=identity.config_digest,
        weights_digest=identity.weights_digest,
        compute_dtype=identity.compute_dtype,
    )


def identity_from(message: pb.ModelIdentity) -> ModelIdentity:
    return ModelIdentity(message.config_digest, message.weights_digest, message.compute_dtype)


def layout_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        dtype=layout.dtype,
        tokens_per_block=layout.tokens_per_block,
        head_size=layout.head_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        first_layer=layout.layers[0],
        last_layer=layout.layers[1],
        first_head=layout.heads[0],
        last_head=layout.heads[1],
    )


def layout_from(message: pb.KvLayout) -> KvLayout:
    """Raises `IncompatibleLayoutError` for a layout that no instance has."""
    layout = KvLayout(
        message.dtype,
        message.tokens_per_block,
        message.head_size,
        message.num_layers,
        message.num_kv_heads,
        (message.first_layer, message.last_layer),
        (message.first_head, message.last_head),
    )
    layout.check()
    return layout


def memory_message(memory: PoolMemory) -> pb.PoolMemory:
    return pb.PoolMemory(
        transport=memory.transport,
        metadata=memory.metadata,
        regions=[
            pb.MemoryRegion(address=address, bytes_per_block=bytes_per_block, num_blocks=num_blocks)
            for address, bytes_per_block, num_blocks in memory.regions
        ],
    )


def memory_from(message: pb.PoolMemory) -> PoolMemory:
    regions = tuple(Region(region.address, region.bytes_per_block, region.num_blocks) for region in message.regions)
    return PoolMemory(message.transport, message.metadata, regions)
