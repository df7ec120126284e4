"""The opaque state of `ContextPhaseParams`: what a generation-only request needs to find and trust its context.

```
bytes  | "IFCS" | version, 2 bytes | CRC-32 of the rest, 4 bytes | ContextState, protobuf |     at most 64 KiB
```
Clients hand it on as it is: through gRPC, Triton or a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from executor.api.errors import InvalidRequestError
from executor.transfer.integrity import ModelIdentity
from executor.transfer.layout import KvLayout
from executor.transfer.messages import identity_from, identity_message, layout_from, layout_message
from protos.inflight.v1 import transfer_pb2 as pb

MAX_BYTES = 64 << 10
VERSION = 1
_MAGIC = b"IFCS"
_HEADER = struct.Struct("<4sHI")
_FIELD = "context_phase_params.opaque_state"


class GeneratedLogProb(NamedTuple):
    """What is known of a token that the context instance generated."""

    log_prob: float
    top: list[tuple[int, float]]
    """Most likely (token, log probability) pairs."""


@dataclass(frozen=True, slots=True)
class ContextState:
    """Where a context lies, and what is needed besides to go on with it."""

    instance_id: bytes
    """Of the instance that has it."""
    address: str
    """HOST:PORT of its Transfer service."""
    context_id: int
    identity: ModelIdentity
    layout: KvLayout
    num_tokens: int
    """Tokens whose keys and values it has: the prompt's."""
    prompt_digest: bytes
    log_probs: Sequence[GeneratedLogProb] = ()
    """Of the first generated tokens, where they were asked for."""
    block_ids: Sequence[int] = ()
    """Of the instance's pool, for all of its tokens; empty: `Open` will say. A client has had them in its hands: they
    are a guess until then."""

    def to_bytes(self) -> bytes:
        """Without block ids where they do not fit. Raises `InvalidRequestError` where it is longer even so."""
        message = self.to_message()
        if _HEADER.size + message.ByteSize() > MAX_BYTES:
            message.ClearField("block_ids")
        body: bytes = message.SerializeToString()
        data = _HEADER.pack(_MAGIC, VERSION, zlib.crc32(body)) + body
        if len(data) > MAX_BYTES:
            raise InvalidRequestError(f"{_FIELD} would have {len(data)} bytes; at most {MAX_BYTES} are handed on")
        return data

    def to_message(self) -> pb.ContextState:
        return pb.ContextState(
            instance_id=self.instance_id,
            address=self.address,
            context_id=self.context_id,
            identity=identity_message(self.identity),
            layout=layout_message(self.layout),
            num_tokens=self.num_tokens,
            prompt_digest=self.prompt_digest,
            block_ids=self.block_ids,
            log_probs=[
                pb.GeneratedLogProb(
                    log_prob=entry.log_prob,
                    top_token_ids=[token_id for token_id, _ in entry.top],
                    top_log_probs=[log_prob for _, log_prob in entry.top],
                )
                for entry in self.log_probs
            ],
        )

    @staticmethod
    def from_message(message: pb.ContextState) -> ContextState:
        """Raises `IncompatibleLayoutError` for a layout that no instance has."""
        return ContextState(
            message.instance_id,
            message.address,
            message.context_id,
            identity_from(message.identity),
            layout_from(message.layout),
            message.num_tokens,
            message.prompt_digest,
            [
                GeneratedLogProb(entry.log_prob, list(zip(entry.top_token_ids, entry.top_log_probs, strict=False)))
                for entry in message.log_probs
            ],
            tuple(message.block_ids),
        )

    @staticmethod
    def from_bytes(data: bytes) -> ContextState:
        """Raises `InvalidRequestError` that says what is wrong with `data`."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise _wrong(f"is a {type(data).__name__}; it must be the bytes of a context-only result")
        data = bytes(data)
        if len(data) > MAX_BYTES:
            raise _wrong(f"has {len(data)} bytes; at most {MAX_BYTES} are taken")
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise _wrong("is not what a context-only request returned")
        _, version, checksum = _HEADER.unpack_from(data)
        if version != VERSION:
            raise _wrong(f"has version {version}; this release reads version {VERSION}")
        body = data[_HEADER.size :]
        if zlib.crc32(body) != checksum:
            raise _wrong("was damaged on its way: its checksum differs")
        try:
            state = ContextState.from_message(pb.ContextState.FromString(body))
        except (DecodeError, ValueError) as error:
            raise _wrong(f"cannot be read: {error}") from error
        return state


def _wrong(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_FIELD} {what}", field=_FIELD)
