"""What transfers did, counted since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferStats:
    """Counts of one instance, as both sender and receiver. Changed under the BatchManager's lock."""

    num_offered: int = 0
    """Contexts that were leased for others."""
    num_sent: int = 0
    """Of these, those that every rank of the receiver acknowledged."""
    num_expired: int = 0
    """Those whose lease ended before."""
    num_found: int = 0
    """Prompts of which a peer had more cached than this instance, and that were fetched from it."""
    num_received: int = 0
    """Contexts that came whole."""
    num_received_tokens: int = 0
    num_received_bytes: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    """Contexts that did not come, and were computed here, by what happened."""
    num_late_messages: int = 0
    """Messages about contexts that had ended, counted and otherwise ignored."""
    num_quarantined_blocks: int = 0
    """Blocks of failed transfers that may still be written to: kept until that is over."""
    transfer_seconds: float = 0.0
    """Time from the first word to the last byte of the contexts that came whole, added up."""
