"""What a context worker hands to the generation worker through Dynamo's frontend, which carries it as JSON.

```
 context worker ── disaggregated_params ──► frontend ── prefill_result.disaggregated_params ──► generation worker
   {"context_phase_params": {...}}   the context lies there: fetch it and go on
   {"ended": "eos", "token_ids": []} the first token was the last one: nothing is left to do
```
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple

from executor.api.errors import InvalidRequestError
from executor.api.request import ContextPhaseParams

_FIELD = "prefill_result.disaggregated_params"


class Ended(NamedTuple):
    """The request ended with its context."""

    finish_reason: str
    """As in a chunk."""
    token_ids: list[int]
    """Its output."""


def to_json(handed: ContextPhaseParams | Ended) -> dict[str, Any]:
    if isinstance(handed, Ended):
        return {"ended": handed.finish_reason, "token_ids": handed.token_ids}
    state = handed.opaque_state
    return {
        "context_phase_params": {
            "first_gen_tokens": handed.first_gen_tokens,
            "req_id": handed.req_id,
            "opaque_state": None if state is None else base64.b64encode(state).decode(),
            "draft_tokens": handed.draft_tokens,
        }
    }


def from_json(prefill_result: Mapping[str, Any]) -> ContextPhaseParams | Ended:
    """What `to_json` made, as the frontend wraps it.

    Raises:
        InvalidRequestError: it is something else; the executor checks what `opaque_state` holds.
    """
    try:
        handed = prefill_result["disaggregated_params"]
        if "ended" in handed:
            return Ended(str(handed["ended"]), [int(token_id) for token_id in handed["token_ids"]])
        params = handed["context_phase_params"]
        state, drafts = params["opaque_state"], params["draft_tokens"]
        return ContextPhaseParams(
            [int(token_id) for token_id in params["first_gen_tokens"]],
            int(params["req_id"]),
            None if state is None else base64.b64decode(state, validate=True),
            None if drafts is None else [int(token_id) for token_id in drafts],
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequestError(
            f"{_FIELD} is not what a context worker of this project hands over: {type(error).__name__}: {error}",
            field=_FIELD,
        ) from None
