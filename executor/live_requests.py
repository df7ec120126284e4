"""All requests without a final response, and the responses that nobody has heard of yet."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batch_manager.request import FinishReason
from executor.api.errors import RequestError
from executor.api.response import Response
from executor.live_request import LiveRequest, LiveSequence, ResponseListener
from executor.receipts import Receipts

_logger = logging.getLogger(__name__)


class LiveRequests:
    """Each request leaves with exactly one final response, which `finish` or `fail` posts.

    Requests enter under the loop's lock, from any thread; all else is the loop's thread's, which takes the lock where
    it goes through them all.
    """

    def __init__(self, on_end: Callable[[int], None], receipts: Receipts) -> None:
        """`on_end` is told the scheduler's id of each sequence that leaves, `receipts` each request."""
        self._on_end = on_end
        self._receipts = receipts
        self.by_id: dict[int, LiveRequest] = {}
        self.sequences: dict[int, LiveSequence] = {}
        """By the scheduler's id; a request has one for each of its `num_return_sequences`."""
        self.num_ended_sequences = 0
        """Since the start."""
        self._outbox: dict[ResponseListener, list[Response]] = {}
        self._num_posted_finals = 0

    @property
    def num_unfinished(self) -> int:
        """Requests whose final response nobody has heard of yet."""
        return len(self.by_id) + self._num_posted_finals

    def add(self, live: LiveRequest) -> None:
        self.by_id[live.request_id] = live
        for sequence in live.sequences:
            self.sequences[sequence.scheduled.request_id] = sequence

    def progress(self, sequence: LiveSequence, iteration: int) -> None:
        """A sequence got tokens and goes on."""
        response = sequence.response(FinishReason.NOT_FINISHED, iteration, is_final=False)
        if response is not None:
            self._post(sequence.request, response)

    def finish(self, sequence: LiveSequence, reason: FinishReason, iteration: int) -> None:
        """A sequence has ended; its request has when it was the last one."""
        live = sequence.request
        live.num_unfinished -= 1
        is_final = live.num_unfinished == 0
        response = sequence.response(reason, iteration, is_final=is_final)
        assert response is not None, "a finished sequence always has a response"
        self._forget(sequence)
        if is_final:
            self._receipts.add(live)
            del self.by_id[live.request_id]
        self._post(live, response)

    def fail(self, live: LiveRequest, error: RequestError) -> None:
        """A request ends with an error; one that has ended is left alone."""
        if live.request_id not in self.by_id:
            return
        for sequence in live.sequences:
            self._forget(sequence)
        self._receipts.add(live, error)
        self._post(live, live.error_response(error))
        del self.by_id[live.request_id]

    def send(self) -> None:
        """Hand out what was posted: one call for each listener."""
        outbox, self._outbox = self._outbox, {}
        for listener, responses in outbox.items():
            try:
                listener(responses)
            except Exception:  # a listener is foreign code; its fault must not stop the others
                _logger.exception("a response listener failed; %d responses are lost", len(responses))
        self._num_posted_finals = 0

    def _forget(self, sequence: LiveSequence) -> None:
        sequence_id = sequence.scheduled.request_id
        if self.sequences.pop(sequence_id, None) is not None:
            self.num_ended_sequences += 1
            self._on_end(sequence_id)

    def _post(self, live: LiveRequest, response: Response) -> None:
        self._outbox.setdefault(live.listener, []).append(response)
        self._num_posted_finals += response.is_final
