"""Walking a request's tokens down the reuse tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batch_manager.kv.block import NO_BLOCK, CachedBlock
from batch_manager.kv.keys import BlockKey, multimodal_tags

if TYPE_CHECKING:
    from batch_manager.request import Request


class AttentionWindow:
    """Which blocks a sequence still needs when a token attends to the last `size` positions only, itself included."""

    def __init__(self, size: int, tokens_per_block: int) -> None:
        self._size = size
        self._tokens_per_block = tokens_per_block

    def first_block(self, num_tokens: int) -> int:
        """Index of the first block that the tokens from position `num_tokens` on may read.

        One block more than the window asks for: a step may feed up to a block of computed tokens again.
        """
        return max((num_tokens - self._size + 1) // self._tokens_per_block - 1, 0)

    @property
    def most_blocks(self) -> int:
        """Blocks that a request which grows token by token needs at once: those of `first_block`, the one that is being
        filled, and the two that are on their way back, or taken ahead, while two steps are in flight."""
        return -(-(self._size + 2) // self._tokens_per_block) + 4


def block_key(request: Request, start: int, end: int) -> BlockKey:
    """Key of the block that holds the positions `[start, end)`."""
    key: BlockKey = tuple(request.token_ids[start:end])
    if request.multimodal_spans:
        key += multimodal_tags(request.multimodal_spans, start, end)
    return key


def match_prefix(root: CachedBlock, request: Request, tokens_per_block: int, limit: int) -> list[CachedBlock]:
    """The cached blocks of the request's first `limit` tokens, first ones first: whole blocks without a gap."""
    tokens, spans = request.token_ids, request.multimodal_spans
    path: list[CachedBlock] = []
    children = root.children
    for start in range(0, limit - tokens_per_block + 1, tokens_per_block):
        end = start + tokens_per_block
        key: BlockKey = tuple(tokens[start:end])
        if spans:
            key += multimodal_tags(spans, start, end)
        child = children.get(key)
        if child is None:
            break
        path.append(child)
        children = child.children
    return path


def match_window(
    root: CachedBlock, request: Request, tokens_per_block: int, limit: int, window: AttentionWindow
) -> list[CachedBlock]:
    """As `match_prefix`, but only the blocks inside the window at the match's end need to be there.

    ```
    path     A   -   C   D   -   F         "-": evicted, known only as the way to what follows
    window           [C   D]               the longest match ends at D: all blocks its next token reads are there
    ```
    """
    path = match_prefix(root, request, tokens_per_block, limit)
    longest, first_without_gap = 0, 0
    for index, node in enumerate(path):
        if node.block_id == NO_BLOCK:
            first_without_gap = index + 1
        elif window.first_block((index + 1) * tokens_per_block) >= first_without_gap:
            longest = index + 1
    return path[:longest]
