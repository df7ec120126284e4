"""Memory that knows what is written in it: the executor's part, played without an engine.

A position's K and V depend on everything up to it, so here they *are* everything up to it: namespace and tokens. What a
request reads is right exactly if each position of its table holds its own beginning.
"""

from __future__ import annotations

from batch_manager.kv import NO_BLOCK, BlockTransfer, CacheTier
from batch_manager.plan import BlockCopy
from batch_manager.request import Request

Content = tuple[object, ...]


def content(request: Request, position: int) -> Content:
    return request.adapter_id, request.cache_salt, *request.token_ids[: position + 1]


class SimulatedKvMemory:
    def __init__(self, num_blocks: int, host_blocks: int, disk_blocks: int, tokens_per_block: int) -> None:
        self.size = tokens_per_block
        self.tiers: dict[CacheTier, list[list[Content | None]]] = {
            tier: [[None] * tokens_per_block for _ in range(count)]
            for tier, count in zip(CacheTier, (num_blocks, host_blocks, disk_blocks), strict=True)
        }
        self.device = self.tiers[CacheTier.DEVICE]

    def write(self, request: Request, position: int) -> None:
        self.device[request.block_ids[position // self.size]][position % self.size] = content(request, position)

    def write_rejected_draft(self, request: Request, position: int) -> None:
        self.device[request.block_ids[position // self.size]][position % self.size] = ("rejected",)

    def copy(self, copies: list[BlockCopy]) -> None:
        for source, target, num_tokens in copies:
            self.device[target][:num_tokens] = self.device[source][:num_tokens]

    def transfer(self, order: BlockTransfer) -> None:
        self.tiers[order.target_tier][order.target_slot] = list(self.tiers[order.source_tier][order.source_slot])

    def damage(self, tier: CacheTier, slot: int) -> None:
        self.tiers[tier][slot] = [("damaged",)] * self.size

    def assert_readable(self, request: Request, num_tokens: int, window: int | None) -> None:
        """The next token can attend to all it has to among the first `num_tokens` positions."""
        first = 0 if window is None else max(num_tokens - window + 1, 0)
        for position in range(first, num_tokens):
            block_id = request.block_ids[position // self.size]
            assert block_id != NO_BLOCK, f"position {position} is needed and has no block"
            assert self.device[block_id][position % self.size] == content(request, position)
