"""Between the loop, which knows requests and their sequences, and the endpoint, which knows contexts and blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from batch_manager import IterationPlan, Request
from batch_manager.plan import Phase
from executor.api.request import ContextPhaseParams, RequestType
from executor.transfer.context_state import GeneratedLogProb
from executor.transfer.integrity import prompt_digest
from executor.transfer.states import TransferState

if TYPE_CHECKING:
    from executor.live_request import LiveRequest, LiveSequence
    from executor.transfer.endpoint import TransferEndpoint


class Handover:
    """What the loop does for transfers. Its thread makes all calls, `expect` aside, under the BatchManager's lock."""

    def __init__(self, endpoint: TransferEndpoint | None) -> None:
        """`endpoint`: `None` where the executor takes no part in transfers."""
        self._endpoint = endpoint
        self._offered: dict[int, int] = {}
        """Contexts by the scheduler's id of their request, until it is answered."""

    def looks_up(self, live: LiveRequest) -> bool:
        """Whether peers will be asked for the request's context: it is to be held for `REMOTE_KV` then."""
        if self._endpoint is None or live.context_state is not None or live.request.wants_context:
            return False
        return len(live.sequences) == 1 and self._endpoint.looks_up(live.sequences[0].scheduled)

    def look_up(self, live: LiveRequest) -> None:
        """A request for which `looks_up` said so was taken in, and is held."""
        if self._endpoint is not None:
            self._endpoint.look_up(live.sequences[0].scheduled, live.request.cache_salt_id)

    def note_step(self, plan: IterationPlan, seconds: float) -> None:
        """A step took so long: what computing a context costs."""
        if self._endpoint is not None and plan.scheduled[0].phase is Phase.CONTEXT:
            self._endpoint.meter.note_context(plan.num_tokens, seconds)

    def expect(self, live: LiveRequest) -> None:
        """A request was taken in."""
        if self._endpoint is None:
            return
        scheduled = live.sequences[0].scheduled
        if live.context_state is not None:
            self._endpoint.expect_generation_only(scheduled, live.context_state)
        elif live.request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY:
            self._endpoint.expect_context_only(scheduled)

    def settle(self, sequences: Mapping[int, LiveSequence]) -> None:
        """Before planning: requests whose contexts have come can run, those whose have not begin anew."""
        if self._endpoint is None:
            return
        for reception in self._endpoint.settle():
            sequence = sequences.get(reception.request.request_id)
            if sequence is not None and reception.state is TransferState.GENERATION_TRANS_COMPLETE:
                sequence.note_transfer(reception.started, reception.ended, reception.num_bytes)

    def begin(self) -> None:
        """After planning: contexts of requests that were just admitted are fetched."""
        if self._endpoint is not None:
            self._endpoint.begin()

    def keep(self, plan: IterationPlan) -> None:
        """Before `update`: contexts that are complete now stay for others."""
        if self._endpoint is not None:
            self._endpoint.keep(plan)

    def offer(self, sequences: Mapping[int, LiveSequence]) -> None:
        """After `update`: contexts of requests that go on elsewhere are offered."""
        if self._endpoint is None:
            return

        def digest(request: Request) -> bytes | None:
            sequence = sequences.get(request.request_id)
            return None if sequence is None or not sequence.goes_on_elsewhere else _digest(sequence)

        self._offered |= self._endpoint.offer(digest)

    def abandon(self) -> None:
        """Instead of `offer`: the step failed."""
        if self._endpoint is not None:
            self._endpoint.abandon()

    def params(self, sequence: LiveSequence, draft: Callable[[Request], list[int]]) -> ContextPhaseParams | None:
        """What a context-only request returns beside its tokens; `None` for all others, and where it has ended.

        Args:
            sequence: is about to finish.
            draft: proposes what may follow its tokens.
        """
        context_id = self._offered.pop(sequence.scheduled.request_id, None)
        if context_id is None or self._endpoint is None:
            return None
        scheduled = sequence.scheduled
        log_probs = []
        if sequence.log_probs:
            tops = sequence.top_log_probs or [[]] * len(sequence.log_probs)
            log_probs = [GeneratedLogProb(*entry) for entry in zip(sequence.log_probs, tops, strict=True)]
        state = self._endpoint.context_state(context_id, scheduled.num_prompt_tokens, _digest(sequence), log_probs)
        first = scheduled.token_ids[scheduled.num_prompt_tokens :]
        drafts = _rest_of(sequence.given_drafts, first) or draft(scheduled)
        return ContextPhaseParams(first, sequence.request.request_id, state.to_bytes(), drafts or None)

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        if self._endpoint is not None:
            self._endpoint.forget(sequence_id)


def _digest(sequence: LiveSequence) -> bytes:
    scheduled = sequence.scheduled
    prompt = scheduled.token_ids[: scheduled.num_prompt_tokens]
    return prompt_digest(prompt, sequence.request.request.cache_salt_id)


def _rest_of(drafts: list[int], generated: list[int]) -> list[int]:
    """What is left of the client's own drafts where they began as the tokens did."""
    return drafts[len(generated) :] if drafts[: len(generated)] == generated else []
