"""Receipts of the requests that ended last."""

from __future__ import annotations

import threading
from collections import OrderedDict

from executor.api.errors import ReceiptNotFoundError, RequestError
from executor.api.receipt import RequestReceipt, SequenceReceipt
from executor.live_request import LiveRequest, LiveSequence


class Receipts:
    """Keeps a bounded number of receipts, the latest. Safe to use from any thread."""

    def __init__(self, max_requests: int) -> None:
        """`max_requests`: receipts kept; 0 keeps none."""
        self._max_requests = max_requests
        self._receipts: OrderedDict[int, RequestReceipt] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, live: LiveRequest, error: RequestError | None = None) -> None:
        """A request has ended, and with it each of its sequences."""
        if not self._max_requests:
            return
        receipt = RequestReceipt(
            live.request_id,
            live.request.client_id,
            tuple(_sequence_receipt(sequence) for sequence in live.sequences),
            "" if error is None else error.message,
        )
        with self._lock:
            self._receipts[live.request_id] = receipt
            if len(self._receipts) > self._max_requests:
                self._receipts.popitem(last=False)

    def get(self, request_id: int) -> RequestReceipt:
        """The receipt of a request that has ended.

        Raises:
            ReceiptNotFoundError: it lives, never was, or too many have ended since.
        """
        with self._lock:
            receipt = self._receipts.get(request_id)
        if receipt is None:
            raise ReceiptNotFoundError(
                f"no receipt of request {request_id}: it has not ended, or is not among the last "
                f"{self._max_requests} that have (receipts_max_requests)"
            )
        return receipt


def _sequence_receipt(sequence: LiveSequence) -> SequenceReceipt:
    scheduled = sequence.scheduled
    receipt = scheduled.receipt
    assert receipt.finish_time is not None, "the BatchManager ends a sequence before its request is answered"
    return SequenceReceipt(
        sequence_index=sequence.index,
        finish_reason=scheduled.finish_reason,
        num_prompt_tokens=scheduled.num_prompt_tokens,
        num_generated_tokens=scheduled.num_generated_tokens,
        num_computed_tokens=receipt.num_computed_tokens,
        num_reused_tokens=receipt.num_reused_tokens,
        num_recomputed_tokens=receipt.num_recomputed_tokens,
        num_transferred_tokens=receipt.num_transferred_tokens,
        num_draft_tokens=receipt.num_draft_tokens,
        num_accepted_draft_tokens=receipt.num_accepted_draft_tokens,
        pauses=tuple(receipt.pauses),
        block_seconds=receipt.block_seconds,
        queue_seconds=receipt.queue_seconds,
        paused_seconds=receipt.paused_seconds,
        total_seconds=receipt.finish_time - receipt.arrival_time,
    )
