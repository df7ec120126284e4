"""One context on its way to this instance: which blocks come, piece by piece, and whether they came whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.transfer.integrity import checksums
from executor.transfer.layout import KvLayout, convert_rows, gather, to_blocks
from executor.transfer.transport import (
    PoolMemory,
    Read,
    ReadState,
    Region,
    Transport,
    TransportError,
    spans_between,
    spans_to_staging,
)
from protos.inflight.v1 import transfer_pb2 as pb

_PIECE_BYTES = 16 << 20
"""A piece is as many whole checksum groups as fit: large enough to reach full bandwidth, small enough that one piece is
checked while the next one comes."""

_PIECES_IN_FLIGHT = 2

_CHECKED_AT_ONCE = 4 << 20
"""Bytes. To hand a smaller piece to another thread takes longer than to check it."""


class ReceptionError(Exception):
    """The context will not come whole: `kind` says why in a word or two, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Piece(NamedTuple):
    """Whole checksum groups that are read together."""

    begin_token: int
    source_ids: Sequence[int]
    groups: slice
    """Of the checksums."""


class _PostedPiece(NamedTuple):
    """A piece that is being read."""

    piece: _Piece
    read: Read
    staging: NDArray[np.uint8] | None


class _CheckedPiece(NamedTuple):
    """A piece that is here and whose checksums are being computed."""

    piece: _Piece
    checksums: Future[list[int]]
    staging: NDArray[np.uint8] | None


class BlockReader:
    """Reads what an `OpenResponse` says into blocks of our pool. One thread makes all calls.

    What a context's state says may be read before the peer has answered; it counts once `prove` was told the answer.
    With equal layouts the bytes go from pool to pool. Otherwise they come into a staging buffer of one piece, are
    checked there, laid out anew, and copied to the pool.
    """

    def __init__(
        self,
        transport: Transport,
        source: PoolMemory,
        regions: Sequence[NDArray[np.uint8]],
        targets: Sequence[Region],
        layout: KvLayout,
        peer_layout: KvLayout,
        block_ids: Sequence[int],
        opened: pb.OpenResponse,
        first_token: int,
        checker: Executor,
        on_checked: Callable[[], None],
        *,
        is_proven: bool = True,
    ) -> None:
        """Plan the reads.

        Args:
            transport: carries them out.
            source: the peer's pool.
            regions: our pool.
            targets: the same, for the transport.
            layout: of our pool.
            peer_layout: of the peer's.
            block_ids: our block table, from token 0 on.
            opened: what the peer said; or will say, without checksums, where not `is_proven`.
            first_token: the first token that is missing here, the start of one of our blocks.
            checker: computes checksums of large pieces while others are being read.
            on_checked: called, on its thread, when it has.
            is_proven: whether the peer has answered; if not, `prove` is told when it does.

        Raises:
            ReceptionError: what the peer said does not fit together.
        """
        self._transport = transport
        self._regions = regions
        self._layout = layout
        self._peer_layout = peer_layout
        self._block_ids = block_ids
        self._source = source
        self._first_token = first_token
        self._end_token = opened.end_token
        self._is_direct = peer_layout == layout
        self._opened = opened
        self.is_proven = is_proven
        """Whether the peer's checksums are known."""
        self._pieces = deque(self._plan())
        self._checker = checker
        self._on_checked = on_checked
        self._posted: deque[_PostedPiece] = deque()
        self._checked: deque[_CheckedPiece] = deque()
        self._targets = targets
        num_layers, two, num_heads, _, row = layout.block_shape
        self._rows = np.zeros((num_layers, two, num_heads, 0, row), np.uint8)
        """Staged and checked, but not yet a whole block of ours: `[layers, 2, heads, tokens, row]`."""
        self.num_bytes = len(opened.block_ids) * peer_layout.bytes_per_block

    def _plan(self) -> list[_Piece]:
        opened, size = self._opened, self._peer_layout.tokens_per_block
        group = opened.blocks_per_checksum
        fits = (
            opened.begin_token % size == 0
            and opened.begin_token <= self._first_token < opened.end_token
            and (not self._is_direct or opened.begin_token == self._first_token)
            and len(opened.block_ids) == -(-(opened.end_token - opened.begin_token) // size)
            and group > 0
            and len(opened.checksums) == (self._num_groups if self.is_proven else 0)
            and -(-opened.end_token // self._layout.tokens_per_block) <= len(self._block_ids)
            and self._source.transport == self._transport.name
        )
        if not fits:
            raise _bad_answer("does not fit together")
        num_groups = max(1, _PIECE_BYTES // (group * self._peer_layout.bytes_per_block))
        return [
            _Piece(
                opened.begin_token + begin * group * size,
                list(opened.block_ids[begin * group : (begin + num_groups) * group]),
                slice(begin, begin + num_groups),
            )
            for begin in range(0, self._num_groups, num_groups)
        ]

    @property
    def _num_groups(self) -> int:
        return -(-len(self._opened.block_ids) // self._opened.blocks_per_checksum)

    def prove(self, opened: pb.OpenResponse) -> None:
        """The peer has answered. Raises `ReceptionError` where it has other blocks than are being read."""
        if (
            opened.begin_token != self._opened.begin_token
            or opened.end_token != self._opened.end_token
            or opened.block_ids != self._opened.block_ids
            or opened.blocks_per_checksum != self._opened.blocks_per_checksum
        ):
            raise _bad_answer("is of other blocks than the context's state")
        if len(opened.checksums) != self._num_groups:
            raise _bad_answer("does not fit together")
        self._opened = opened
        self.is_proven = True

    def advance(self) -> bool:
        """Go on as far as that is possible without waiting; whether everything is there and proved whole.

        Raises:
            ReceptionError: it will never be. Reads may still be in flight: `cancel` until it says otherwise.
        """
        self._post()
        while self._posted and (state := self._posted[0].read.poll()) is not ReadState.IN_PROGRESS:
            piece, _, staging = self._posted.popleft()
            self._release(staging)
            if state is ReadState.FAILED:
                raise ReceptionError("read failed", "the peer's memory could not be read")
            self._post()
            self._check(piece, staging)
        while self.is_proven and self._checked and self._checked[0].checksums.done():
            self._take(self._checked.popleft())
        return self.is_proven and not self._posted and not self._checked

    @property
    def is_reading(self) -> bool:
        """Whether reads are in flight, which go on while they are looked at."""
        return bool(self._posted)

    def _post(self) -> None:
        while self._pieces and len(self._posted) < _PIECES_IN_FLIGHT:
            piece = self._pieces.popleft()
            try:
                staging, spans = self._spans(piece)
            except TransportError as error:
                raise ReceptionError("bad answer", str(error)) from error
            try:
                read = self._transport.read(self._source, spans)
            except TransportError as error:
                self._release(staging)
                raise ReceptionError("read refused", str(error)) from error
            self._posted.append(_PostedPiece(piece, read, staging))

    def _spans(self, piece: _Piece) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint64]]:
        if self._is_direct:
            targets = self._targets_of(piece)
            return None, spans_between(self._source.regions, piece.source_ids, self._targets, targets)
        staging = np.zeros((len(piece.source_ids), self._peer_layout.bytes_per_block), np.uint8)
        if sum(region.bytes_per_block for region in self._source.regions) != staging.shape[1]:
            raise TransportError("the peer's regions do not add up to its blocks")
        self._transport.register([staging])
        return staging, spans_to_staging(self._source.regions, piece.source_ids, Region.of(staging))

    def _targets_of(self, piece: _Piece) -> Sequence[int]:
        first = piece.begin_token // self._layout.tokens_per_block
        return self._block_ids[first : first + len(piece.source_ids)]

    def _check(self, piece: _Piece, staging: NDArray[np.uint8] | None) -> None:
        """A piece is here: begin to prove it whole."""
        if staging is None:
            regions, block_ids = self._regions, self._targets_of(piece)
        else:
            regions, block_ids = _split(staging, self._source.regions), range(len(staging))
        found: Future[list[int]]
        if len(block_ids) * self._peer_layout.bytes_per_block > _CHECKED_AT_ONCE:
            found = self._checker.submit(checksums, regions, block_ids)
            found.add_done_callback(lambda _: self._on_checked())
        else:
            found = Future()
            found.set_result(checksums(regions, block_ids))
        self._checked.append(_CheckedPiece(piece, found, staging))

    def _take(self, checked: _CheckedPiece) -> None:
        """A piece's checksums are computed: if it was staged and is whole, bring it into the pool."""
        piece, found, staging = checked
        if found.result() != self._opened.checksums[piece.groups]:
            raise ReceptionError("checksum", "blocks are not what the peer sent: their checksum differs")
        if staging is not None:
            self._relayout(piece, staging)

    def _relayout(self, piece: _Piece, staging: NDArray[np.uint8]) -> None:
        """Write as many whole blocks as there are rows for; the last block may be short."""
        held = len(piece.source_ids) * self._peer_layout.tokens_per_block
        num_tokens = min(held, self._end_token - piece.begin_token)
        rows = gather([(self._peer_layout, staging)], self._layout, num_tokens)
        if self._peer_layout.dtype != self._layout.dtype:
            rows = convert_rows(rows, self._peer_layout.dtype, self._layout.dtype)
        skipped = max(0, self._first_token - piece.begin_token)
        rows = np.concatenate([self._rows, rows[:, :, :, skipped:]], 3)
        size, end = self._layout.tokens_per_block, piece.begin_token + num_tokens
        num_ready = rows.shape[3] if end == self._end_token else rows.shape[3] // size * size
        blocks = to_blocks(rows[:, :, :, :num_ready], self._layout)
        for index, block in enumerate(blocks, (end - rows.shape[3]) // size):
            for region, part in zip(self._regions, _parts(block, self._targets), strict=True):
                region[self._block_ids[index]] = part
        self._rows = rows[:, :, :, num_ready:]

    def cancel(self) -> bool:
        """Ask all reads to end; whether nothing will be written any more."""
        self._pieces.clear()
        while self._posted and self._posted[0].read.cancel():
            self._release(self._posted.popleft().staging)
        return not self._posted

    def _release(self, staging: NDArray[np.uint8] | None) -> None:
        if staging is not None:
            self._transport.unregister([staging])


def _bad_answer(what: str) -> ReceptionError:
    return ReceptionError("bad answer", f"the peer's answer to Open {what}")


def _split(staging: NDArray[np.uint8], regions: Sequence[Region]) -> list[NDArray[np.uint8]]:
    """A staging array's columns, region by region, as the sender's checksums take them."""
    ends = np.cumsum([region.bytes_per_block for region in regions])
    return [np.ascontiguousarray(part) for part in np.split(staging, ends[:-1], axis=1)]


def _parts(block: NDArray[np.uint8], regions: Sequence[Region]) -> list[NDArray[np.uint8]]:
    return list(np.split(block, np.cumsum([region.bytes_per_block for region in regions])[:-1]))
