"""What identifies a block's content: the namespace, the token ids, tags where a token id is not all there is.

Every extra is tagged by what it is, so a salt never equals an adapter that happens to have the same number.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from batch_manager.request import MultimodalSpan, Request


class Namespace(NamedTuple):
    """What must be equal before any token is compared."""

    adapter_id: int | None = None
    cache_salt: int | None = None


class MultimodalTag(NamedTuple):
    """Placeholder tokens of a block stand for a part of this item, which starts `offset` tokens after the block."""

    offset: int
    content_hash: bytes


BlockKey = tuple[int | MultimodalTag, ...]
"""The block's token ids, then a tag for each multimodal item that reaches into it. Compared in full, so two contents
with equal hashes are still two keys."""


def namespace_of(request: Request) -> Namespace:
    return Namespace(request.adapter_id, request.cache_salt)


def multimodal_tags(spans: Sequence[MultimodalSpan], start: int, end: int) -> tuple[MultimodalTag, ...]:
    """Tags of the block that holds the positions `[start, end)`."""
    return tuple(
        MultimodalTag(span.start - start, span.content_hash)
        for span in spans
        if span.start < end and start < span.start + span.length
    )


def is_plain(key: BlockKey) -> bool:
    """Whether the tokens are all there is to the block."""
    return not isinstance(key[-1], MultimodalTag)


DIGEST_BYTES = 32
"""Others (routers, peers, disk files) know blocks by digest only, so it must resist collisions made on purpose."""


def namespace_digest(namespace: Namespace) -> bytes:
    """[32] digest of a root, BLAKE2b."""
    digest = hashlib.blake2b(b"kv-root", digest_size=DIGEST_BYTES)
    for tag, value in ((b"adapter", namespace.adapter_id), (b"salt", namespace.cache_salt)):
        text = b"" if value is None else str(value).encode()
        digest.update(struct.pack("<B?I", len(tag), value is not None, len(text)) + tag + text)
    return digest.digest()


def block_digest(parent: bytes, key: BlockKey) -> bytes:
    """[32] digest of a block behind the prefix with digest `parent`, BLAKE2b."""
    tokens = [part for part in key if isinstance(part, int)]
    tags = [part for part in key if isinstance(part, MultimodalTag)]
    digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES)
    digest.update(struct.pack(f"<II{len(tokens)}q", len(tokens), len(tags), *tokens))
    for tag in tags:
        digest.update(struct.pack("<qI", tag.offset, len(tag.content_hash)) + tag.content_hash)
    return digest.digest()
