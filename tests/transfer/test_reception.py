"""Reading what a peer says it has: whole, in part, or nonsense."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.transfer.integrity import BLOCKS_PER_CHECKSUM, checksums
from executor.transfer.layout import KvLayout
from executor.transfer.local_network import LocalNetwork
from executor.transfer.reception import BlockReader, ReceptionError
from executor.transfer.transport import PoolMemory, Region, TransportError, spans_between
from protos.inflight.v1 import transfer_pb2 as pb

LAYOUT = KvLayout("float32", 4, 2, 2, 2, (0, 2), (0, 2))
NUM_BLOCKS = 24


class Pools:
    """A peer's pool and ours, each of two layers."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        size = LAYOUT.bytes_per_block // 4
        self.theirs = [random.integers(0, 256, (NUM_BLOCKS, size), np.uint8) for _ in range(4)]
        self.ours = [np.zeros((NUM_BLOCKS, size), np.uint8) for _ in range(4)]
        network = LocalNetwork()
        peer = network.open_transport(b"peer")
        peer.register(self.theirs)
        self.transport = network.open_transport(b"us")
        self.transport.register(self.ours)
        self.memory = PoolMemory("local", peer.metadata(), tuple(map(Region.of, self.theirs)))

    def opened(self, block_ids: list[int], begin: int, end: int) -> pb.OpenResponse:
        return pb.OpenResponse(
            outcome=pb.OPEN_OUTCOME_OPENED,
            begin_token=begin,
            end_token=end,
            block_ids=block_ids,
            checksums=checksums(self.theirs, block_ids),
            blocks_per_checksum=BLOCKS_PER_CHECKSUM,
        )

    def reader(
        self,
        opened: pb.OpenResponse,
        block_ids: list[int],
        first: int = 0,
        *,
        is_proven: bool = True,
        **other: object,
    ) -> BlockReader:
        with ThreadPoolExecutor(1) as checker:
            return BlockReader(
                self.transport,
                self.memory,
                self.ours,
                [Region.of(region) for region in self.ours],
                LAYOUT,
                replace(LAYOUT, **other),  # type: ignore[arg-type]
                block_ids,
                opened,
                first,
                checker,
                lambda: None,
                is_proven=is_proven,
            )


def finish(reader: BlockReader) -> None:
    while not reader.advance():
        pass


tables = st.integers(1, 10).flatmap(
    lambda count: st.tuples(
        *(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=count, max_size=count, unique=True) for _ in range(2))
    )
)


@given(tables, st.integers(0, 9), st.integers(1, 4))
def test_blocks_come_to_their_places_and_no_other_is_touched(
    tables: tuple[list[int], list[int]], num_held: int, last: int
) -> None:
    theirs, ours = tables
    num_held = min(num_held, len(theirs) - 1)
    pools = Pools()
    end = 4 * (len(theirs) - 1) + last
    finish(pools.reader(pools.opened(theirs[num_held:], 4 * num_held, end), ours, 4 * num_held))
    for region, target in zip(pools.theirs, pools.ours, strict=True):
        assert np.array_equal(target[ours[num_held:]], region[theirs[num_held:]])
        untouched = np.setdiff1d(np.arange(NUM_BLOCKS), ours[num_held:])
        assert not target[untouched].any()


def test_damage_is_noticed() -> None:
    pools = Pools()
    opened = pools.opened([1, 2, 3], 0, 12)
    pools.theirs[2][3, 5] ^= 1
    with pytest.raises(ReceptionError) as caught:
        finish(pools.reader(opened, [4, 5, 6]))
    assert caught.value.kind == "checksum"


@pytest.mark.parametrize(
    "change",
    [
        {"begin_token": 2},
        {"begin_token": 4},
        {"end_token": 0},
        {"end_token": 500},
        {"blocks_per_checksum": 0},
        {"checksums": []},
        {"checksums": [1, 2]},
        {"block_ids": [1, 2]},
        {"block_ids": [1, 2, NUM_BLOCKS]},
        {"block_ids": [1, 2, 2**32 - 1]},
    ],
    ids=str,
)
def test_answers_that_do_not_fit_together_are_refused_before_a_byte_moves(change: dict[str, object]) -> None:
    pools = Pools()
    opened = pools.opened([1, 2, 3], 0, 12)
    for name, value in change.items():
        opened.ClearField(name)  # type: ignore[arg-type]
        opened.MergeFrom(pb.OpenResponse(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ReceptionError) as caught:
        finish(pools.reader(opened, [4, 5, 6]))
    assert caught.value.kind == "bad answer"
    assert not any(region.any() for region in pools.ours)


def announced(opened: pb.OpenResponse) -> pb.OpenResponse:
    """What a context's state says of the answer."""
    guess = pb.OpenResponse()
    guess.CopyFrom(opened)
    guess.ClearField("checksums")
    return guess


@given(tables, st.integers(0, 9), st.booleans())
def test_what_is_read_before_the_peer_answers_counts_once_it_has(
    tables: tuple[list[int], list[int]], num_held: int, answers_late: bool
) -> None:
    theirs, ours = tables
    num_held = min(num_held, len(theirs) - 1)
    pools = Pools()
    opened = pools.opened(theirs[num_held:], 4 * num_held, 4 * len(theirs))
    reader = pools.reader(announced(opened), ours, 4 * num_held, is_proven=False)
    if answers_late:
        assert not any(reader.advance() for _ in range(20))
    reader.prove(opened)
    finish(reader)
    for region, target in zip(pools.theirs, pools.ours, strict=True):
        assert np.array_equal(target[ours[num_held:]], region[theirs[num_held:]])


@pytest.mark.parametrize(
    "change", [{"block_ids": [1, 2, 9]}, {"end_token": 11}, {"begin_token": 4}, {"checksums": [7, 8]}], ids=str
)
def test_an_answer_of_other_blocks_than_those_read_is_refused(change: dict[str, object]) -> None:
    pools = Pools()
    opened = pools.opened([1, 2, 3], 0, 12)
    reader = pools.reader(announced(opened), [4, 5, 6], is_proven=False)
    for name, value in change.items():
        opened.ClearField(name)  # type: ignore[arg-type]
        opened.MergeFrom(pb.OpenResponse(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ReceptionError, match=r"other blocks|does not fit together"):
        reader.prove(opened)


@given(tables)
def test_spans_are_as_long_as_the_tables_allow(tables: tuple[list[int], list[int]]) -> None:
    theirs, ours = tables
    here, there = [Region(0, 10, NUM_BLOCKS)], [Region(1 << 20, 10, NUM_BLOCKS)]
    spans = spans_between(there, theirs, here, ours).tolist()
    moved = {}
    for source, target, num_bytes in spans:
        for step in range(num_bytes // 10):
            moved[(source - (1 << 20)) // 10 + step] = target // 10 + step
    assert moved == dict(zip(theirs, ours, strict=True))
    joined = {(source + num_bytes, target + num_bytes) for source, target, num_bytes in spans}
    assert not joined & {(source, target) for source, target, _ in spans}


def test_pools_of_other_regions_are_refused() -> None:
    with pytest.raises(TransportError, match="other regions"):
        spans_between([Region(0, 10, 4)], [0], [Region(0, 20, 4)], [0])
