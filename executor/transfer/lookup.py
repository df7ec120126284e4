"""Asks peers what they have cached of a prompt, before the request stands in line.

```
 submit ─► held (REMOTE_KV) ── Find to every peer ──► the longest that is cheaper to fetch than to compute
                                │ nobody has more, or nobody answers in time
                                └───────────────────────────────────────► computed
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batch_manager import KvCacheManager, Request
from executor.transfer.context_state import ContextState
from executor.transfer.integrity import ModelIdentity, prompt_digest
from executor.transfer.layout import KvLayout
from executor.transfer.link_meter import CostMeter
from executor.transfer.messages import identity_message, layout_message
from executor.transfer.peer import PeerError, PeerLink, PendingCall
from protos.inflight.v1 import transfer_pb2 as pb

_ANSWER_SECONDS = 0.1
"""Peers that have not answered by then are not waited for."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A request that is held while peers are asked."""

    request: Request
    cache_salt: int | None
    calls: dict[str, PendingCall] = field(default_factory=dict)
    """By the peer's address."""
    found: ContextState | None = None
    """What will be fetched."""
    unwanted: list[ContextState] = field(default_factory=list)
    """What peers keep for us in vain."""


class PeerLookup:
    """Finds contexts at peers. The transfer thread makes all calls but `is_worth_asking`, which is the loop's."""

    def __init__(
        self,
        peers: Sequence[str],
        kv: KvCacheManager,
        link_to: Callable[[str], PeerLink],
        identity: ModelIdentity,
        layout: KvLayout,
        meter: CostMeter,
        on_news: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            peers: addresses of instances to ask; none: nobody is asked.
            kv: what is cached here. Looked at with the BatchManager's lock.
            link_to: the way to a peer.
            identity: what this instance runs.
            layout: of its pool.
            meter: tells what is cheaper.
            on_news: called, on any thread, when a peer has answered.
        """
        self._peers = tuple(peers)
        self._kv = kv
        self._link_to = link_to
        self._identity = identity_message(identity)
        self._layout = layout
        self._layout_message = layout_message(layout)
        self._meter = meter
        self._on_news = on_news

    def is_worth_asking(self, request: Request) -> bool:
        """Whether a block of the prompt is missing here that a peer might have. With the lock."""
        return bool(self._peers) and self._num_missing(request, self._num_whole_tokens(request)) > 0

    def ask(self, lookup: Lookup) -> None:
        """Send the question to every peer."""
        request = lookup.request
        find = pb.FindRequest(
            token_ids=request.token_ids[: self._num_whole_tokens(request)],
            cache_salt_id=lookup.cache_salt,
            identity=self._identity,
            layout=self._layout_message,
        )
        for address in self._peers:
            lookup.calls[address] = self._link_to(address).call("Find", find, _ANSWER_SECONDS, self._on_news)

    def is_over(self, lookup: Lookup) -> bool:
        """Whether every peer has answered, or will not; `found` then says what to fetch. With the lock."""
        if not all(call.done() for call in lookup.calls.values()):
            return False
        states = []
        for address, call in lookup.calls.items():
            try:
                answer: pb.FindResponse = call.answer()
            except PeerError:
                continue  # it is computed, then, or another peer has it
            if answer.num_tokens:
                states.append((address, ContextState.from_message(answer.state)))
        request = lookup.request
        for address, state in sorted(states, key=lambda entry: -entry[1].num_tokens):
            digest = prompt_digest(request.token_ids[: state.num_tokens], lookup.cache_salt)
            missing = self._num_missing(request, state.num_tokens)
            num_bytes = missing * state.layout.bytes_per_block // state.layout.tokens_per_block
            is_ours = state.prompt_digest == digest and state.num_tokens <= self._num_whole_tokens(request)
            if is_ours and missing > 0 and self._meter.is_fetching_cheaper(address, num_bytes, missing):
                lookup.found = state
                break
        lookup.unwanted = [state for _, state in states if state is not lookup.found]
        return True

    def close_unwanted(self, lookup: Lookup) -> None:
        """Peers need not keep what is not fetched. One that does not hear of it keeps it until its lease ends."""
        for state in lookup.unwanted:
            request = pb.CloseRequest(
                instance_id=state.instance_id,
                context_id=state.context_id,
                num_ranks=1,
                outcome=pb.CLOSE_OUTCOME_CANCELLED,
            )
            self._link_to(state.address).call("Close", request, _ANSWER_SECONDS, self._on_news)

    def _num_whole_tokens(self, request: Request) -> int:
        """Of the prompt, in whole blocks, but for its last token, which is always computed."""
        size = self._layout.tokens_per_block
        return (request.num_prompt_tokens - 1) // size * size

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        return num_tokens - self._kv.find_reuse(request).num_tokens
