"""Where a transfer is. Numbers are TensorRT-LLM's request states, whose order is the order of events."""

from __future__ import annotations

from enum import IntEnum


class TransferState(IntEnum):
    ERROR = -1
    """The transfer failed; the receiver computes the context itself."""
    GENERATION_INIT = 8
    """The receiver has the request; its blocks are not allocated yet."""
    GENERATION_TRANS_IN_PROGRESS = 9
    """Blocks are allocated and leased; they are being read."""
    CONTEXT_INIT_AND_TRANS = 11
    """The sender computes the context and gives away what is ready."""
    GENERATION_TRANS_COMPLETE = 12
    """All blocks are there and proved whole."""
    CONTEXT_TRANS_IN_PROGRESS = 21
    """The context is complete and leased, until every rank of the receiver acknowledged or the lease ends."""
    CONTEXT_COMPLETE = 22
    """The lease has ended."""
