"""Keeps prompts and answers out of a trace, and in it all that decides about reuse.

The block manager compares token sequences from their beginning, and where two differ it looks at which token is
smaller. So every token is replaced by a code that depends on it, on all tokens before it and on a secret key that is
thrown away:

```
 tokens  5 9 9 4        5 9 9 7       9 9 4
 codes   a b c d        a b c e       f g h        d < e, since 4 < 7; nothing else can be compared
```
Equal beginnings have equal codes, codes behind an equal beginning are ordered as their tokens are, and everything else
looks random: how often a token occurs cannot be counted.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence

from batch_manager.plan import IterationPlan, Progress
from batch_manager.request import FinishReason, MultimodalSpan, Request
from batch_manager.trace.errors import TraceError

DROPPED_CODE = 0
"""Stands for a sampled token that was dropped: behind a stop, or of a request that had ended."""

_FIRST_CODE = 1
_TOKEN_BITS = 31
_SPREAD_BITS = 45
"""Codes of all tokens behind one beginning spread over so many bits."""
_SHIFT_BITS = 62
"""They are shifted by a random number of so many bits, which hides where in the spread a code is."""


class Redactor:
    """Codes of the tokens of live requests. About 5 us a token."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._contexts: dict[int, hashlib.blake2b] = {}
        """By live request, the digest of all its tokens so far."""

    def redact_live(self, request: Request) -> Request:
        """As `redact_request`, for one that was taken in: what it generates will be redacted too, until `forget`."""
        context = self._contexts[request.request_id] = self._new_digest(b"")
        return self._with_codes(request, self._codes(context, request.token_ids))

    def redact_request(self, request: Request) -> Request:
        """A request that is scheduled as `request` is, but knows nothing that ends it (see `let_end`). Tenant and
        adapter stay as they are.

        Raises:
            TraceError: a token id is not in `[0, 2^31)`.
        """
        return self._with_codes(request, self._codes(self._new_digest(b""), request.token_ids))

    def _with_codes(self, request: Request, codes: list[int]) -> Request:
        return Request(
            request.request_id,
            codes[: request.num_prompt_tokens],
            request.max_new_tokens,
            priority=request.priority,
            tenant=request.tenant,
            arrival_time=request.arrival_time,
            allotted_time=request.allotted_time,
            cache_salt=None if request.cache_salt is None else self._salt(request.cache_salt),
            adapter_id=request.adapter_id,
            adapter_pages=request.adapter_pages,
            beam_width=request.beam_width,
            retention=request.retention,
            generated_token_ids=codes[request.num_prompt_tokens :],
            num_remote_tokens=request.num_remote_tokens,
            multimodal_spans=[
                MultimodalSpan(span.start, span.length, self._new_digest(b"item" + span.content_hash).digest()[:32])
                for span in request.multimodal_spans
            ],
        )

    def redact_sampled(
        self, plan: IterationPlan, sampled: Sequence[Sequence[int]], progress: Sequence[Progress]
    ) -> list[list[int]]:
        """Codes of what was sampled, `DROPPED_CODE` for tokens that were dropped."""
        made_of = {made.request.request_id: made for made in progress}
        redacted = []
        for entry, tokens in zip(plan.scheduled, sampled, strict=True):
            request_id = entry.request.request_id
            made = made_of.get(request_id)
            codes = [] if made is None else self._codes(self._contexts[request_id], made.new_token_ids)
            redacted.append(codes + [DROPPED_CODE] * (len(tokens) - len(codes)))
        return redacted

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._contexts.pop(request_id, None)

    def _new_digest(self, data: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(data, key=self._key)

    def _salt(self, salt: int) -> int:
        return int.from_bytes(self._new_digest(f"salt {salt}".encode()).digest()[:7], "little")

    def _codes(self, context: hashlib.blake2b, tokens: Sequence[int]) -> list[int]:
        codes = []
        for token in tokens:
            if not 0 <= token < 1 << _TOKEN_BITS:
                raise TraceError(f"token id {token} cannot be redacted; ids are in [0, 2^{_TOKEN_BITS})")
            codes.append(_ordered_code(context.digest(), token))
            context.update(struct.pack("<I", token))
        return codes


def _ordered_code(randomness: bytes, token: int) -> int:
    """A code that grows with `token`, for the same 64 random bytes.

    The token's bits choose a side, from the highest on; the border between the sides is drawn anew at each of them.
    """
    low, high = _FIRST_CODE, 1 << _SPREAD_BITS
    for bit in reversed(range(_TOKEN_BITS)):
        room = 1 << bit  # codes that each side needs at least
        border = low + room + ((high - low - 2 * room) * randomness[bit] >> 8)
        if token >> bit & 1:
            low = border
        else:
            high = border
    return low + (int.from_bytes(randomness[-8:], "little") >> 64 - _SHIFT_BITS)


def let_end(request: Request, codes: Sequence[int], reason: FinishReason) -> None:
    """Tell a request of a redacted trace, right before it takes over `codes`, that the last one not dropped ends it."""
    if reason in (FinishReason.END_ID, FinishReason.STOP_WORDS):
        last = next(code for code in reversed(codes) if code != DROPPED_CODE)
        request.stop_ids = frozenset({last})
        request.end_id = last if reason is FinishReason.END_ID else None
